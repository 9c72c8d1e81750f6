"""The papers' tables: mechanisms that exist, numbers that agree with the papers' own sentences."""

from __future__ import annotations

import pytest

from varifocal import MECHANISMS
from varifocal.results.papers import PaperTable, paper_tables


def table(name: str) -> PaperTable:
    return next(one for one in paper_tables() if one.name == name)


def loss(one: PaperTable, mechanism: str) -> float:
    found = next(row.number(one.loss) for row in one.rows if row.mechanism == mechanism)
    assert found is not None
    return found


def test_every_row_names_a_mechanism_and_every_table_begins_with_the_baseline() -> None:
    for one in paper_tables():
        assert one.rows[0].mechanism == "dense"
        assert {row.mechanism.partition(".")[0] for row in one.rows} <= set(MECHANISMS)


def test_head_gating_improves_by_what_its_abstract_says() -> None:
    # The paper: "a 5.7% improvement in validation loss"; its table gives 5.6 %.
    gating = table("Learned head gating")
    assert 1 - loss(gating, "head_gated") / loss(gating, "dense") == pytest.approx(0.056, abs=5e-4)


def test_context_adaptive_takes_the_memory_that_its_abstract_says() -> None:
    caa = table("Context-Adaptive Attention")
    memory = {row.mechanism: row.number(caa.memory) for row in caa.rows}
    assert memory["context_adaptive"] is not None
    assert memory["dense"] is not None
    assert memory["context_adaptive"] / memory["dense"] == pytest.approx(2.1, abs=0.05)


def test_spread_does_not_hide_a_number() -> None:
    assert loss(table("Adaptive Sparse-Geometric Attention"), "sparse_geometric") == 5.148


def test_column_that_a_table_lacks_has_no_number() -> None:
    gating = table("Learned head gating")
    assert gating.rows[0].number(gating.memory) is None
