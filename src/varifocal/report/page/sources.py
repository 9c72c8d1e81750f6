"""What a report is made of: the files of runs and comparisons, read with care."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from varifocal.report.analysis import Analysis, read_analysis
from varifocal.report.comparison_tables import cost_table, loss_table, scaled_down
from varifocal.statistics.comparison import (
    PLAN,
    RESULT,
    Comparison,
    gather_comparison,
    read_comparison,
    read_curve,
    read_json,
)

Traces = dict[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class RunFiles:
    """The files of one run."""

    name: str
    path: Path
    summary: dict[str, Any] | None
    """None while the run is not finished."""
    curve: list[tuple[int, float]]
    """Tokens and validation loss."""
    step: int
    """The last one that was recorded."""
    traces: Traces
    """What gates did at each validation: "step" [N], the others [N, L, H] or [N, L, H, D]."""
    analyses: tuple[Analysis, ...]
    command: str
    notes: tuple[str, ...] = ()
    """What could not be read or is missing."""


@dataclass(frozen=True, eq=False)
class Source:
    """A comparison with its runs, or one run."""

    path: Path
    comparison: Comparison | None
    runs: dict[str, list[RunFiles]]
    """By arm."""
    notes: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        return (
            str(self.comparison.content.get("title", self.path.name)) if self.comparison else self.path.absolute().name
        )

    def every_run(self) -> Iterator[RunFiles]:
        for runs in self.runs.values():
            yield from runs


def read_source(path: Path) -> Source:
    """A folder of `varifocal compare` or `ablate`, its comparison.json, or a run's folder; ValueError otherwise."""
    if not path.exists():
        raise ValueError(f"{path} does not exist; give the folder of a run or of a comparison")
    if (path / PLAN).is_file():
        return read_comparison_folder(path)
    if path.is_file() or (path / RESULT).is_file():
        comparison = checked(read_comparison(path), path)
        return Source(
            path, comparison, {}, [f"{path.name} was given alone: without the runs there are no gates to show."]
        )
    if (path / "config.toml").is_file():
        run = read_run(path, path.absolute().name)
        return Source(path, None, {run.name: [run]}, list(run.notes))
    raise ValueError(
        f"{path} is neither a run nor a comparison: there is no {PLAN}, {RESULT} or config.toml in it; give a folder "
        "that 'varifocal train', 'compare' or 'ablate' wrote"
    )


def read_comparison_folder(path: Path) -> Source:
    """A comparison with the runs of its cells."""
    try:
        comparison = gather_comparison(path)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"cannot read {path / PLAN} as the plan of a comparison: it lacks {error}") from error
    comparison = checked(comparison, path)
    runs: dict[str, list[RunFiles]] = {}
    notes: list[str] = []
    waiting = []
    for arm in comparison.content["arms"]:
        for seed in comparison.content["seeds"]:
            name = f"{arm['name']}-seed{seed}"
            folder = path / "cells" / name
            if not (folder / "config.toml").is_file():
                waiting.append(name)
                continue
            run = read_run(folder, name)
            runs.setdefault(arm["name"], []).append(run)
            notes += run.notes
    if waiting:
        notes.append(f"Planned and not begun: {', '.join(waiting)}.")
    return Source(path, comparison, runs, notes)


def checked(comparison: Comparison, path: Path) -> Comparison:
    """The comparison; ValueError if its numbers cannot be summed up."""
    try:
        loss_table(comparison), cost_table(comparison), scaled_down(comparison)
    except (KeyError, TypeError, AttributeError, IndexError, StopIteration, ValueError) as error:
        raise ValueError(
            f"{path} is a comparison with parts missing or of another kind ({type(error).__name__}: {error}); "
            "run the comparison again"
        ) from error
    return comparison


def read_run(path: Path, name: str) -> RunFiles:
    """The files of a run; what cannot be read becomes a note."""
    notes = []
    summary, environment = None, {}
    if (path / "summary.json").is_file():
        try:
            summary = read_json(path / "summary.json", what="the summary of a run")
        except ValueError as error:
            notes.append(f"{name}: {error}.")
    try:
        environment = read_json(path / "environment.json", what="the environment of a run")
    except ValueError:
        notes.append(f"{name}: its environment.json cannot be read, so commit and command are not known.")
    try:
        curve, step = read_curve(path / "metrics.jsonl"), last_step(path / "metrics.jsonl")
    except (OSError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        curve, step = [], 0
        notes.append(f"{name}: its metrics.jsonl cannot be read ({type(error).__name__}).")
    if summary is None:
        notes.append(f"{name} has not finished: the last recorded step is {step}; what is shown of it is not its end.")
    traces, trouble = read_traces(path / "gates.npz")
    if trouble:
        notes.append(f"{name}: its gates.npz cannot be shown: {trouble}.")
    analyses = []
    for file in sorted(path.glob("analysis/*.json")):
        try:
            analyses.append(read_analysis(file))
        except ValueError as error:
            notes.append(f"{name}: {error}.")
    return RunFiles(
        name=name,
        path=path,
        summary=summary,
        curve=curve,
        step=step,
        traces=traces,
        analyses=tuple(analyses),
        command=str(environment.get("command", "")),
        notes=tuple(notes),
    )


def last_step(file: Path) -> int:
    """The highest step in a metrics file; 0 for none."""
    step = 0
    if file.is_file():
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                step = max(step, int(json.loads(line).get("step", 0)))
            except json.JSONDecodeError:
                continue
    return step


def read_traces(file: Path) -> tuple[Traces, str]:
    """The arrays of gates.npz, and what is wrong with it; nothing and nothing if there is none."""
    if not file.is_file():
        return {}, ""
    try:
        with numpy.load(file, allow_pickle=False) as content:
            traces = {name: content[name] for name in content.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zipfile.LargeZipFile) as error:
        return {}, " ".join(str(error).split()) or type(error).__name__
    steps = traces.get("step")
    if steps is None or steps.ndim != 1 or not len(steps):
        return {}, "it has no steps"
    for name, one in traces.items():
        if name != "step" and (
            one.ndim < 3 or one.shape[0] != len(steps) or not numpy.issubdtype(one.dtype, numpy.number)
        ):
            return {}, f"its array {name!r} has shape {one.shape}, expected validations, layers and heads"
    return traces, ""
