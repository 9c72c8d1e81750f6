"""The result file of a retrofit as a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from varifocal.report.retrofit import retrofit_table
from varifocal.results.retrofit import RetrofitResult

RUN: dict[str, Any] = {
    "mechanism": "head_gated",
    "asked": {"window": 64, "gate": {"start": -4}},
    "share": 0.018,
    "source_loss": 2.5,
    "loss_before": 2.75,
    "largest_logit_difference": 0.5,
}


def test_row_says_what_was_asked_promised_and_measured(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"experiment": "retrofit", "runs": [RUN, RUN | {"share": None, "loss_after": 2.625}]}))
    _, first, second = retrofit_table(RetrofitResult.read(file))
    assert first == ["head_gated window=64, gate.start=-4", "dense but 2e-02", "5.0e-01", "2.7500", "+0.2500", ""]
    assert (second[1], second[-1]) == ("none", "2.6250")


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text("{}")
    with pytest.raises(ValueError, match="is not a result of 'varifocal retrofit'"):
        RetrofitResult.read(file)
