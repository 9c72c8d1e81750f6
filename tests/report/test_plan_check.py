"""Errors of predictions are what they are said to be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from varifocal.plan.paper_order import order_checks
from varifocal.report.plan_check import error_table, memory_error, plan_table, summed_up, time_error
from varifocal.results.papers import paper_tables
from varifocal.results.plan_check import PlanCheck, PlanRow

RESULT = Path(__file__).parents[2] / "results" / "plan_check.json"


def row(seconds: float, predicted: float, *, preset: str = "tiny", peak: int | None = None) -> PlanRow:
    return PlanRow(
        preset=preset, name="dense", length=256, seconds=seconds, spread=0.0, rounds=1, predicted_seconds=predicted,
        peak_bytes=peak, predicted_bytes=90,
    )  # fmt: skip


def test_median_is_of_sizes_and_the_worst_keeps_its_sign() -> None:
    found = summed_up([time_error(one) for one in (row(1, 1.1), row(1, 0.6), row(1, 1.2))])
    assert found is not None
    assert [found.median, found.worst] == pytest.approx([0.2, -0.4])
    assert found.count == 3


def test_rows_without_a_measurement_are_left_out() -> None:
    assert summed_up([memory_error(row(1, 1))]) is None
    found = summed_up([memory_error(one) for one in (row(1, 1), row(1, 1, peak=100))])
    assert found is not None
    assert found.worst == pytest.approx(-0.1)


def test_tables_name_every_preset_and_all() -> None:
    check = replace(PlanCheck.read(RESULT), rows=(row(1, 1.1, peak=100), row(2, 1, preset="small")))
    assert [line[0] for line in error_table(check)[1:]] == ["tiny", "small", "all"]
    assert plan_table(check)[1] == ["tiny dense", "256", "1", "1.1", "+10%", "0", "0", "-10%"]


@pytest.mark.parametrize("content", ['{"benchmark": "model"}', "{broken"])
def test_file_that_is_not_a_result_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(ValueError, match=r"r\.json"):
        PlanCheck.read(tmp_path / "r.json")


def test_result_in_the_repository_can_be_read() -> None:
    check = PlanCheck.read(RESULT)
    assert len({item.preset for item in check.rows}) == 3
    assert check.machine.measured


def test_order_of_the_paper_is_compared_pair_by_pair() -> None:
    table = next(one for one in paper_tables() if one.memory is not None)
    names = [one.mechanism for one in table.rows]
    assert names == ["dense", "combiner", "local", "context_adaptive"]
    same = {"memory": dict(zip(names, (31.5, 29.8, 30.2, 66.6), strict=True))}
    other = {"speed": dict(zip(names, (1.0, 1.05, 1.03, 1.2), strict=True))}
    memory, speed = order_checks(table, {**same, **other})  # type: ignore[dict-item]
    assert memory.disagreements == ()
    assert len(speed.disagreements) == 3
    assert all("CAA (0.82x)" in sentence for sentence in speed.disagreements)


def test_predictions_that_hardly_differ_have_no_order() -> None:
    table = next(one for one in paper_tables() if one.time is not None)
    (speed,) = order_checks(table, {"speed": {"dense": 1.0, "head_gated": 0.999}})
    assert speed.rows[1].paper == pytest.approx(24.5 / 25.1)
    assert "arithmetic sees no difference" in speed.disagreements[0]
