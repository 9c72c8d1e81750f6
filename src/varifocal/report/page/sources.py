"""What a report is made from: the files of runs and comparisons; a file that cannot be read becomes a note."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from varifocal.results.analysis import Analysis
from varifocal.results.comparison import ComparisonRecord, PlanRecord, cell_folder, cell_name
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
class Source:
    """A comparison with its runs, or one run."""

    path: Path
    comparison: Comparison | None
    runs: dict[str, list[RunFiles]]
    """By arm."""
    notes: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        return self.comparison.title if self.comparison else self.path.absolute().name

    def every_run(self) -> Iterator[RunFiles]:
        for runs in self.runs.values():
            yield from runs


def read_source(path: Path) -> Source:
    """A folder of `varifocal compare` or `ablate`, its comparison.json, or a run's folder; ValueError otherwise."""
    if not path.exists():
        raise ValueError(f"{path} does not exist; give the folder of a run or of a comparison")
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
        f"{path} is neither a run nor a comparison: there is no {PlanRecord.filename}, {ComparisonRecord.filename} or "
        f"{CONFIG} in it; give a folder that 'varifocal train', 'compare' or 'ablate' wrote"
    )


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
