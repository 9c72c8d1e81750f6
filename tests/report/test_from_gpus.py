"""The one line that whoever has a GPU sends back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from varifocal.cli import check as check_verb
from varifocal.conformance import Conformance
from varifocal.environment import place_and_versions
from varifocal.report.from_gpus import bench_line, check_line
from varifocal.results.attention_bench import AttentionBench
from varifocal.results.conformance import ConformanceRecord, FindingRecord

RESULTS = Path(__file__).parents[2] / "results"


def finding(row: str, verdict: str, error: float | None = None) -> FindingRecord:
    return FindingRecord(row=row, verdict=verdict, error=error, detail="")


def test_line_of_a_check_counts_promises_and_names_the_broken_ones() -> None:
    results = [
        ConformanceRecord(name="dense", conforms=True, findings=(finding("prefix", "kept", 1e-7),)),
        ConformanceRecord(
            name="local", conforms=False, findings=(finding("prefix", "kept", 3e-6), finding("packed", "broken"))
        ),
    ]
    line = check_line(results, where="a GPU", backend="flex", dtype="float32")
    assert line == "check on a GPU, flex, float32: 2 kept (worst error 3e-06), 1 broken (local: packed)"


def test_line_of_a_bench_tells_speeds_at_the_longest_text() -> None:
    line = bench_line(AttentionBench.read(RESULTS / "attention_bench.json"), where="a GPU")
    assert "\n" not in line
    assert "training at 32768:" in line
    assert ", local 43.13" in line


def test_check_prints_the_line_where_it_did_not_run_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a device that claims to be another: there is no GPU here."""

    class Elsewhere:
        place = torch.device("meta")

    monkeypatch.setattr(check_verb, "find_device", lambda name: Elsewhere)
    monkeypatch.setattr(check_verb, "place_and_versions", lambda place: "nowhere, torch 2")
    monkeypatch.setattr(check_verb, "check_conformance", lambda subject, **options: Conformance("dense", ()))
    check_verb.check(mechanism=["dense"], device="meta")
    assert "check on nowhere, torch 2, auto, float64: 0 kept (worst error 0e+00), 0 broken" in capsys.readouterr().out


def test_place_is_told_with_the_versions_that_matter() -> None:
    told = place_and_versions(torch.device("cpu"))
    assert f"torch {torch.__version__}, triton " in told
