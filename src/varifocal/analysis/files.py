"""Analyzes a model of any kind and saves the result in the run that the model belongs to, or in a given file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from varifocal.analysis.analyze import AnalysisPlan, analyze
from varifocal.data import PreparedData
from varifocal.results.analysis import Analysis
from varifocal.results.files import require_folder
from varifocal.results.run import CONFIG, MODEL
from varifocal.training.opening import open_model_for

FOLDER = "analysis"


def analyze_model(
    source: str,
    data: PreparedData,
    plan: AnalysisPlan,
    *,
    out: Path | None = None,
    on_row: Callable[[int, int], None] | None = None,
) -> tuple[Analysis, Path | None]:
    """The analysis, and the file that holds it: `out`, or by default analysis/SPLIT.json of the model's run.

    If `out` is not given and the model does not belong to a run, nothing is written and the file is None.
    """
    file = default_file(source, plan.split) if out is None else out
    if file is not None:
        require_folder(file.parent if file.parent.name == FOLDER else file)
    found = replace(analyze(open_model_for(source, data), data, plan, on_row=on_row), model=source)
    if file is not None:
        file.parent.mkdir(exist_ok=True)
        found.write(file)
    return found, file


def default_file(model: str, split: str) -> Path | None:
    """analysis/SPLIT.json of the run that the model belongs to; None if it belongs to none."""
    for run in (Path(model), Path(model).parent):
        if (run / CONFIG).is_file() and (run / MODEL).is_dir():
            return run / FOLDER / f"{split}.json"
    return None
