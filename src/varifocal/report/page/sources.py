"""What a report is made from: the files of runs and comparisons; a file that cannot be read becomes a note."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from varifocal.results.analysis import Analysis
from varifocal.results.comparison import ComparisonRecord, PlanRecord, cell_folder, cell_name
from varifocal.results.focus import FocusMap, FocusMeasure, FocusQuestion
from varifocal.results.gate_traces import GATES, Traces, read_gate_traces
from varifocal.results.metrics import METRICS, MetricsEntry, read_metrics, validation_curve
from varifocal.results.run import CONFIG, RunEnvironment, RunSummary
from varifocal.statistics.comparison import Comparison, gather_comparison, read_comparison


@dataclass(frozen=True, eq=False)
class RunFiles:
    """The files of one run."""

    name: str
    path: Path
    summary: RunSummary | None
    """None while the run is not finished."""
    curve: tuple[tuple[int, float], ...]
    """Tokens and validation loss."""
    step: int
    """The last step that was recorded."""
    traces: Traces
    """What gates did at each validation: "step" [N], the others [N, L, H] or [N, L, H, D]."""
    analyses: dict[Path, Analysis]
    """By file."""
    command: str
    notes: tuple[str, ...] = ()
    """What could not be read or is missing."""


@dataclass(frozen=True, eq=False)
class FocusFiles:
    """The files of a focused model."""

    map: FocusMap
    measured: FocusMeasure | None
    question: FocusQuestion | None


@dataclass(frozen=True, eq=False)
class Source:
    """A comparison with its runs, one run, or a focused model."""

    path: Path
    comparison: Comparison | None
    runs: dict[str, list[RunFiles]]
    """By arm."""
    notes: list[str] = field(default_factory=list)
    focus: FocusFiles | None = None

    @property
    def title(self) -> str:
        if self.focus is not None:
            return f"{Path(self.focus.map.source).stem}, focused"
        return self.comparison.title if self.comparison else self.path.absolute().name

    def every_run(self) -> Iterator[RunFiles]:
        for runs in self.runs.values():
            yield from runs


def read_source(path: Path) -> Source:
    """A folder of `compare`, `ablate`, `train` or `focus`, or a comparison.json; ValueError otherwise."""
    if not path.exists():
        raise ValueError(f"{path} does not exist; give the folder of a run, of a comparison or of a focused model")
    if (path / FocusMap.filename).is_file():
        return read_focus(path)
    if (path / PlanRecord.filename).is_file():
        return read_comparison_folder(path)
    if path.is_file() or (path / ComparisonRecord.filename).is_file():
        return Source(
            path,
            read_comparison(path),
            {},
            [f"{path.name} was given alone: without the runs there are no gates to show."],
        )
    if (path / CONFIG).is_file():
        run = read_run(path, path.absolute().name)
        return Source(path, None, {run.name: [run]}, list(run.notes))
    raise ValueError(
        f"{path} is neither a run nor a comparison nor a focused model: there is no {PlanRecord.filename}, "
        f"{ComparisonRecord.filename}, {CONFIG} or {FocusMap.filename} in it; give a folder that 'varifocal train', "
        "'compare', 'ablate' or 'focus' wrote"
    )


def read_focus(path: Path) -> Source:
    """The folder of a focused model; what was not measured or asked is None."""
    notes = []
    measured, question = None, None
    if (file := path / FocusMeasure.filename).is_file():
        try:
            measured = FocusMeasure.read(file)
        except ValueError as error:
            notes.append(f"{error}.")
    else:
        notes.append(
            f"What it costs was not measured: 'varifocal measure {path} SOURCE --texts TEXTS --json {file}' does that."
        )
    if (file := path / FocusQuestion.filename).is_file():
        try:
            question = FocusQuestion.read(file)
        except ValueError as error:
            notes.append(f"{error}.")
    record = FocusMap.read(path / FocusMap.filename)
    if not record.heads:
        raise ValueError(f"{path / FocusMap.filename} has no heads; make the map again")
    return Source(path, None, {}, notes, FocusFiles(record, measured, question))


def read_comparison_folder(path: Path) -> Source:
    """A comparison with the runs of its cells."""
    comparison = gather_comparison(path)
    runs: dict[str, list[RunFiles]] = {}
    notes: list[str] = []
    waiting = []
    for arm in comparison.record.arms:
        for seed in comparison.record.seeds:
            name = cell_name(arm.name, seed)
            folder = cell_folder(path, name)
            if not (folder / CONFIG).is_file():
                waiting.append(name)
                continue
            run = read_run(folder, name)
            runs.setdefault(arm.name, []).append(run)
            notes += run.notes
    if waiting:
        notes.append(f"Planned but not started: {', '.join(waiting)}.")
    return Source(path, comparison, runs, notes)


def read_run(path: Path, name: str) -> RunFiles:
    """The files of a run; what cannot be read becomes a note."""
    notes = []
    summary, command = None, ""
    entries: list[MetricsEntry] = []
    traces: Traces = {}
    if (path / RunSummary.filename).is_file():
        try:
            summary = RunSummary.read(path / RunSummary.filename)
        except ValueError as error:
            notes.append(f"{name}: {error}.")
    try:
        command = RunEnvironment.read(path / RunEnvironment.filename).command
    except ValueError:
        notes.append(f"{name}: its environment.json cannot be read, so commit and command are not known.")
    try:
        entries = read_metrics(path / METRICS)
    except ValueError as error:
        notes.append(f"{name}: its metrics.jsonl cannot be read ({error}).")
    step = max((entry.step for entry in entries), default=0)
    if summary is None:
        notes.append(f"{name} has not finished: the last recorded step is {step}, and the page shows it as it is.")
    try:
        traces = read_gate_traces(path / GATES)
    except ValueError as error:
        notes.append(f"{name}: its gates.npz cannot be shown: {error}.")
    analyses = {}
    for file in sorted(path.glob("analysis/*.json")):
        try:
            analyses[file] = Analysis.read(file)
        except ValueError as error:
            notes.append(f"{name}: {error}.")
    return RunFiles(
        name=name,
        path=path,
        summary=summary,
        curve=validation_curve(entries),
        step=step,
        traces=traces,
        analyses=analyses,
        command=command,
        notes=tuple(notes),
    )
