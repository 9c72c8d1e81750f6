"""The table of the whole field says what mechanisms and result files say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from varifocal.attention.mechanisms import MECHANISMS
from varifocal.bench.field import HEADER, field_table
from varifocal.results.attention_bench import AttentionBench
from varifocal.statistics.comparison import read_comparison

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, list[str]], list[str]]:
    """The rows by mechanism, and the reasons of empty cells."""
    bench = AttentionBench.read(ROOT / "results/attention_bench.json")
    table, reasons = field_table([bench], [read_comparison(ROOT / "results/fineweb/comparison.json")])
    assert table[0] == HEADER
    return dict(zip(MECHANISMS.ours, table[1:], strict=True)), reasons


def test_every_mechanism_says_from_whom_it_is_and_what_it_reads(found: tuple[dict[str, list[str]], list[str]]) -> None:
    for name, row in found[0].items():
        assert row[0] == f"[{name}](docs/mechanisms/{name}.md)"
        assert all(row[1:3]), name
        assert float(row[3].replace(",", "")) > 0
        assert float(row[4]) > 0


def test_speeds_and_losses_are_those_of_the_files(found: tuple[dict[str, list[str]], list[str]]) -> None:
    bench = AttentionBench.read(ROOT / "results/attention_bench.json")
    row = bench.row("local", "training", 8192)
    assert row is not None
    assert found[0]["local"][5] == f"{row.speedup:.2f}x"
    assert re.fullmatch(r"[\d.]+x exact, [\d.]+x blocks", found[0]["context_adaptive"][5])
    assert re.fullmatch(r"[+-][\d.]+ ± [\d.]+", found[0]["local"][6])
    assert found[0]["dense"][6].endswith("(baseline)")


def test_every_empty_cell_has_a_reason(found: tuple[dict[str, list[str]], list[str]]) -> None:
    rows, reasons = found
    for column, word in ((5, "No speed"), (6, "No loss")):
        told = next((reason for reason in reasons if reason.startswith(word)), "")
        for name, row in rows.items():
            assert (f"`{name}`" in told) == (not row[column]), name
