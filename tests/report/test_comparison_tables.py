"""A comparison's folder to numbers, tables, sentences and a picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from varifocal.report.comparison_plot import difference_curve, loss_curve, plot_comparison
from varifocal.report.comparison_tables import (
    comparison_markdown,
    cost_table,
    loss_table,
    paper_comparisons,
    recall_table,
    scaled_down,
    time_table,
    verdicts,
)
from varifocal.statistics.comparison import Comparison, gather_comparison, loss_at, read_comparison
from varifocal.statistics.estimates import holm

LOSSES = {
    "dense": [5.00, 5.02, 4.98],
    "head_gated": [4.90, 4.93, 4.87],
    "local": [5.00, 5.04, 4.97],
    "head_gated.no_gate": [4.95, 4.98, 4.92],
}


def write_folder(folder: Path, losses: dict[str, list[float]], *, timed: bool = False, **extra: Any) -> Path:
    """A folder as `varifocal compare` leaves it; `timed` as it leaves it now, where local takes twice the time."""
    seeds = list(range(max(len(values) for values in losses.values())))
    arms = [
        {"name": name, "mechanism": name, "reference": name.partition(".")[0] if "." in name else None}
        for name in losses
    ]
    plan = {
        "title": "A test", "baseline": "dense", "seeds": seeds, "arms": arms, "data": "sotu", "workers": 1,
        "environment": {},
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(plan))
    for name, values in losses.items():
        for seed, loss in enumerate(values):
            run = folder / "cells" / f"{name}-seed{seed}"
            run.mkdir(parents=True)
            slow = 2 if name == "local" else 1
            summary = {
                "mechanism": name, "preset": "tiny", "seed": seed, "validation_tokens": 100, "processes": 1,
                "data_fingerprint": "d", "tokenizer_fingerprint": "t", "finished": "now",
                "parameters": 1_300_000, "steps": 10, "tokens": 40_960, "validation_loss": loss,
                "bits_per_byte": loss / 3, "seconds": 30.0 * slow, "tokens_per_second": 1000.0 / slow,
                "peak_bytes": 500_000_000 // slow,
            }  # fmt: skip
            if timed:
                summary["processor_seconds"] = 20.0 * slow
            (run / "summary.json").write_text(json.dumps(summary))
            (run / "test.json").write_text(json.dumps({"test_loss": loss + 0.1, **extra}))
            (run / "config.toml").write_text('[optimization]\nbatch = 8\nlength = 512\nprecision = "float32"\n')
            lines = [{"step": s, "tokens": 4096 * s, "validation_loss": loss + 1 / s} for s in (1, 5, 10)]
            if timed:
                lines = [line | {"processor_seconds": 2.0 * slow * line["step"]} for line in lines]
            (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 1')
    return folder


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    return gather_comparison(write_folder(tmp_path / "out", LOSSES))


def test_difference_is_paired_by_seed(comparison: Comparison) -> None:
    head_gated = comparison.results[1]
    assert head_gated.difference is not None
    assert head_gated.difference.mean == pytest.approx(-0.1)
    assert head_gated.difference.deviation == pytest.approx(0.01)
    assert comparison.results[0].difference is None


def test_ablation_is_compared_with_its_full_form_too(comparison: Comparison) -> None:
    ablated = comparison.results[3]
    assert ablated.to_reference is not None
    assert ablated.to_reference.mean == pytest.approx(0.05)
    assert "vs its full form" in loss_table(comparison)[0]


def test_slow_arm_is_read_where_the_baseline_ended(tmp_path: Path) -> None:
    timed = gather_comparison(write_folder(tmp_path / "timed", LOSSES, timed=True))
    results = {result.name: result for result in timed.results}
    # local is validated after 4, 20 and 40 processor seconds; dense ends after 20.
    local = [value + 1 / 5 for value in LOSSES["local"]]
    found = results["local"].difference_at_time
    assert found is not None
    expected = [ours - theirs - 1 / 10 for ours, theirs in zip(local, LOSSES["dense"], strict=True)]
    assert found.mean == pytest.approx(sum(expected) / 3)
    assert results["head_gated"].difference_at_time is not None
    assert results["head_gated"].difference_at_time.mean == pytest.approx(-0.1)
    arms = ("head_gated", "head_gated.no_gate", "local")
    raw = [one.p_value for name in arms if (one := results[name].difference_at_time) and one.p_value is not None]
    assert [results[name].adjusted_p_at_time for name in arms] == pytest.approx(holm(raw))


def test_loss_between_validations_lies_on_their_line() -> None:
    curve = ((1.0, 6.0), (3.0, 4.0), (5.0, 3.5))
    assert [loss_at(curve, seconds) for seconds in (0.5, 1.0, 2.0, 3.0, 5.0, 9.0)] == [None, 6.0, 5.0, 4.0, 3.5, 3.5]


def test_equal_time_has_its_table_and_page(tmp_path: Path, comparison: Comparison) -> None:
    timed = gather_comparison(write_folder(tmp_path / "timed", LOSSES, timed=True))
    table = time_table(timed)
    assert table is not None
    assert table[0][2] == "loss at dense's end"
    assert [row[-1] for row in table[1:]] == ["1.00x", "1.00x", "0.50x", "1.00x"]
    assert "## Equal time" in comparison_markdown(timed)
    assert time_table(comparison) is None
    plot_comparison(timed, tmp_path / "timed.png")
    assert (tmp_path / "timed.png").stat().st_size > 10_000


def test_only_seeds_that_both_have_are_paired(tmp_path: Path) -> None:
    found = gather_comparison(write_folder(tmp_path / "out", {"dense": [5.0, 6.0], "local": [5.5]}))
    assert found.results[1].difference is not None
    assert found.results[1].difference.count == 1
    assert found.results[1].difference.mean == pytest.approx(0.5)


def test_ratios_are_to_the_baseline(comparison: Comparison) -> None:
    local = comparison.results[2]
    assert local.speed_ratio == pytest.approx(0.5)
    assert local.memory_ratio == pytest.approx(0.5)
    assert cost_table(comparison)[3] == ["local", "1,300,000", "250 MB", "0.50x", "500", "0.50x", "60 s"]


def test_verdict_claims_no_more_than_its_interval(comparison: Comparison) -> None:
    gated, local, *_ = verdicts(comparison)
    assert gated.startswith("head_gated has a lower loss than dense by 0.1000 (95 % interval -0.1248 to -0.0752")
    assert local.startswith("local shows no difference from dense")


def test_one_seed_allows_no_claim(tmp_path: Path) -> None:
    (sentence,) = verdicts(gather_comparison(write_folder(tmp_path / "out", {"dense": [5.0], "local": [4.0]})))
    assert sentence == "local differs from dense by -1.0000 with one seed, so the spread is not known."


def test_equal_arm_is_called_equal(tmp_path: Path) -> None:
    same = {"dense": [5.0, 5.1], "sparse_geometric.both_off": [5.0, 5.1]}
    assert verdicts(gather_comparison(write_folder(tmp_path / "out", same)))[0].endswith(
        "has exactly the loss of dense with every seed."
    )


def test_line_says_what_was_scaled_down(comparison: Comparison) -> None:
    assert scaled_down(comparison) == (
        "Scaled down: our runs have 1.3M parameters, sotu, 0.041M tokens of training, batches of 8 texts of 512 "
        "tokens, float32, 3 seeds; the papers have 132M to 134M parameters on FineWeb, 10B tokens or 50,000 steps, "
        "one run each."
    )


def test_paper_stands_beside_ours(comparison: Comparison) -> None:
    tables = {table.name: rows for table, rows in paper_comparisons(comparison)}
    assert list(tables) == ["Context-Adaptive Attention", "Learned head gating"]
    header, dense, gated = tables["Learned head gating"]
    assert header[-3:] == ["ours: loss", "ours: vs dense", "ours: time"]
    assert dense[1:4] == ["4.9266", "24.5", "+0.000"]
    assert gated[:4] == ["Our Method (head_gated)", "4.6498", "25.1", "-0.277"]
    assert gated[4:] == ["4.9000 ± 0.0745", "-0.1000 ± 0.0248", "30 s"]


def test_row_of_a_paper_that_was_not_run_says_so(comparison: Comparison) -> None:
    _, rows = paper_comparisons(comparison)[0]
    assert next(row for row in rows if "CAA" in row[0])[5] == "not run"
    assert {len(row) for row in rows} == {len(rows[0])}


def test_every_table_of_the_page_carries_its_line(comparison: Comparison) -> None:
    page = comparison_markdown(comparison, plot="curves.png")
    assert page.count("Scaled down:") == page.count("| --- |") == 4


def test_recall_is_shown_by_distance(tmp_path: Path) -> None:
    recall = {str(distance): {"accuracy": 1 / distance} for distance in (2, 16)}
    found = gather_comparison(write_folder(tmp_path / "out", {"dense": [5.0]}, recall=recall))
    assert recall_table(found) == [["right answers at distance", "2", "16"], ["dense", "50.0%", "6.2%"]]


def test_text_has_no_recall(comparison: Comparison) -> None:
    assert recall_table(comparison) is None


def test_curves_average_over_seeds_and_ignore_half_a_line(comparison: Comparison) -> None:
    curve = loss_curve(comparison, "dense")
    assert [tokens for tokens, _ in curve] == [4096, 20480, 40960]
    assert curve[-1][1].mean == pytest.approx(5.1)
    assert [point.mean for _, point in difference_curve(comparison, "head_gated")] == pytest.approx([-0.1] * 3)


def test_picture_is_written_whole(comparison: Comparison, tmp_path: Path) -> None:
    plot_comparison(comparison, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".part*"))


def test_written_comparison_reads_as_it_was(comparison: Comparison, tmp_path: Path) -> None:
    comparison.with_results().write(tmp_path / "comparison.json")
    again = read_comparison(tmp_path)
    assert loss_table(again) == loss_table(comparison)
    assert difference_curve(again, "local") == difference_curve(comparison, "local")


def test_folder_without_a_finished_cell_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out", {"dense": [5.0]})
    (folder / "cells" / "dense-seed0" / "summary.json").unlink()
    with pytest.raises(ValueError, match=r"no cell of .* is finished; run the same comparison again"):
        gather_comparison(folder)


def test_other_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "comparison.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a result of 'varifocal compare'"):
        read_comparison(tmp_path)


def test_comparison_without_a_cell_is_refused(comparison: Comparison, tmp_path: Path) -> None:
    replace(comparison.record, cells=()).write(tmp_path / "comparison.json")
    with pytest.raises(ValueError, match="has no finished cell of its arms; run the comparison again"):
        read_comparison(tmp_path)
