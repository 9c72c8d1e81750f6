"""The papers' claims beside comparisons: which comparison counts, and what is said of the claim."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.report.test_comparison_tables import write_folder
from varifocal.cli.main import app
from varifocal.report.papers import Claim, answers, claims, claims_table, papers_page, verdict
from varifocal.statistics.comparison import Comparison, gather_comparison


def one(name: str, against: str = "dense") -> Claim:
    (found,) = [claim for claim in claims() if (claim.name, claim.against.mechanism) == (name, against)]
    return found


def comparison(folder: Path, gated: list[float], **setting: Any) -> Comparison:
    found = gather_comparison(write_folder(folder, {"dense": [5.0, 5.02, 4.98], "head_gated": gated}))
    return Comparison(replace(found.record, setting=replace(found.record.setting, **setting)))


def test_claims_are_the_papers_differences() -> None:
    assert one("context_adaptive").size == pytest.approx(4.712 - 4.9266)
    assert one("head_gated").size == pytest.approx(-0.2768)
    assert one("sparse_geometric").size == pytest.approx(0.221)
    assert one("dynamic_sparse").size == pytest.approx(-0.023)
    assert one("sparse_geometric.no_scaling", "sparse_geometric").size == pytest.approx(0.053)


@pytest.mark.parametrize(
    ("gated", "said"),
    [
        ([4.72, 4.75, 4.70], "inside"),
        ([4.90, 5.30, 4.50], "inside, and so is no difference: not told apart here"),
        ([4.90, 4.921, 4.879], "outside; the same sign, another size"),
        ([5.00, 5.03, 4.97], "outside; no such difference here"),
        ([5.20, 5.221, 5.18], "outside; the opposite sign"),
        ([4.7], "one seed: not known"),
    ],
)
def test_verdict_says_no_more_than_the_interval(gated: list[float], said: str, tmp_path: Path) -> None:
    claim = one("head_gated")
    (answer,) = answers(claim, {"small": comparison(tmp_path, gated)})
    assert verdict(claim, answer) == said


def test_largest_comparison_with_an_interval_counts(tmp_path: Path) -> None:
    given = {
        "small": comparison(tmp_path / "a", [4.9, 4.92, 4.88], tokens=1_000),
        "large": comparison(tmp_path / "b", [4.8, 4.83, 4.78], tokens=2_000),
        "largest, but one seed": comparison(tmp_path / "c", [4.8], tokens=3_000),
        "equal time": comparison(tmp_path / "d", [4.7, 4.7, 4.7], tokens=4_000, seconds=60.0),
    }
    assert [answer.source for answer in answers(one("head_gated"), given)] == [
        "large",
        "small",
        "largest, but one seed",
    ]
    row = next(row for row in claims_table(given) if row[0].startswith("`head_gated`"))
    assert row[5].endswith(", large")


def test_claims_that_nobody_asked_are_named(tmp_path: Path) -> None:
    page = papers_page({"small": comparison(tmp_path, [4.9, 4.92, 4.88])}, command="a command")
    assert "Open here: `combiner` against `dense`" in page
    assert "Made by `a command`" in page


def test_command_writes_the_page_from_folders(tmp_path: Path) -> None:
    write_folder(tmp_path / "runs", {"dense": [5.0, 5.02], "head_gated": [4.9, 4.93]})
    out = tmp_path / "papers.md"
    done = CliRunner().invoke(app, ["report", str(tmp_path / "runs"), "--papers", "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert "| `head_gated` against `dense` | -0.277 | -0.0950 |" in out.read_text()
