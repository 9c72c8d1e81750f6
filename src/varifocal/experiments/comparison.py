"""Runs a comparison: trains every cell of the plan, resumes what was interrupted, then measures the test split."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from varifocal.data import open_data
from varifocal.data.files import explained
from varifocal.environment import environment
from varifocal.experiments.comparison_plan import Cell, ComparisonPlan
from varifocal.results.comparison import CELLS, ComparisonRecord, PlanRecord, TestRecord, cell_folder
from varifocal.results.files import write_whole
from varifocal.results.metrics import METRICS, MetricsEntry, last_entry
from varifocal.results.run import MODEL, RunSummary
from varifocal.statistics.comparison import Comparison, gather_comparison
from varifocal.training.config import TrainingConfig

POLL = 0.3
"""Seconds between two checks of the running cells."""


@dataclass(frozen=True, kw_only=True)
class CellProgress:
    """The progress of a comparison."""

    cell: str
    """What is being done: the name of a cell, or some other work."""
    done: int
    """Cells that are finished."""
    cells: int
    step: int = 0
    steps: int = 0
    loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class ComparisonOutcome:
    """How a comparison ended."""

    folder: Path
    finished: tuple[str, ...]
    skipped: tuple[str, ...]
    """The finished cells that had been finished by an earlier call."""
    failed: dict[str, str]
    """The reason of each failed cell."""
    comparison: Comparison | None
    """The results of the finished cells, as comparison.json holds them; None if no cell is finished."""


OnProgress = Callable[[CellProgress], None]
TrainCells = Callable[[dict[str, TrainingConfig], Path, OnProgress], dict[str, str]]
"""Trains cells into cells/NAME of the folder and returns why cells failed, by name."""


def compare(
    plan: ComparisonPlan,
    out: Path,
    *,
    workers: int = 1,
    on_progress: OnProgress | None = None,
    train_cells: TrainCells | None = None,
) -> ComparisonOutcome:
    """Train every cell that is not finished, then measure each finished one on the test split, once.

    The folder gets a run directory for each cell, and comparison.json, anew with every cell that is finished.

    Args:
        plan: what to compare.
        out: the comparison's folder; one that exists must hold the same comparison, perhaps with fewer arms or seeds.
        workers: how many cells train at once, each in its own process.
        on_progress: called now and then.
        train_cells: trains the cells instead, in another way.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    report: OnProgress = on_progress or (lambda progress: None)
    check_models(plan)
    open_folder(plan, out, workers=workers)
    with explained(out):
        data = prepare_data(plan, out, report)
        configs = {cell.name: plan.config(cell, data=data) for cell in plan.cells()}
        before = [name for name in configs if is_finished(out, name)]
        missing = {name: config for name, config in configs.items() if name not in before}
        run = train_cells or (lambda cells, folder, say: train_in_processes(cells, folder, workers=workers, say=say))
        failed = run(missing, out, lambda progress: report(counted(progress, len(before), len(configs))))
        finished = [name for name in configs if is_finished(out, name)]
        for number, name in enumerate(finished):
            report(CellProgress(cell=f"test split of {name}", done=number, cells=len(finished)))
            measure_on_test_split(cell_folder(out, name), configs[name], most_tokens=plan.test_tokens)
        comparison = write_results(out) if finished else None
    return ComparisonOutcome(
        folder=out, finished=tuple(finished), skipped=tuple(before), failed=failed, comparison=comparison
    )


def write_results(out: Path) -> Comparison:
    """Write comparison.json from the cells that are finished, and return what it holds."""
    found = gather_comparison(out)
    found.with_results().write(out / ComparisonRecord.filename)
    return found


def counted(progress: CellProgress, before: int, cells: int) -> CellProgress:
    """The progress among all cells of the plan, including those that were finished earlier."""
    return CellProgress(**{**vars(progress), "done": progress.done + before, "cells": cells})


def is_finished(out: Path, name: str) -> bool:
    """Whether a cell's run is finished."""
    return (cell_folder(out, name) / RunSummary.filename).is_file()


def check_models(plan: ComparisonPlan) -> None:
    """ValueError now rather than hours later if an arm's options do not fit the model."""
    from varifocal.training.start import model_config

    for arm in plan.arms:
        try:
            model_config(plan.config(Cell(arm=arm, seed=plan.seeds[0])), None)
        except ValueError as error:
            raise ValueError(f"arm {arm.name!r}: {error}") from error


def open_folder(plan: ComparisonPlan, out: Path, *, workers: int) -> None:
    """Write the plan into a new folder; ValueError if the folder holds something else."""
    file = out / PlanRecord.filename
    record = plan.record(workers=workers, environment=environment())
    if file.is_file():
        require_same(record, PlanRecord.read(file), out)
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists but is not a comparison's folder; choose another folder")
    with explained(out):
        (out / CELLS).mkdir(parents=True, exist_ok=True)
        record.write(file)


def require_same(plan: PlanRecord, stored: PlanRecord, out: Path) -> None:
    """ValueError unless the folder's plan is the same, except for added arms and seeds."""
    again = "choose another folder, or run the same comparison again to continue it"
    for section, values in plan.base.items():
        for key, value in values.items():
            old = stored.base.get(section, {}).get(key)
            # Threads change how long a run takes, not what it finds.
            if old != value and (section, key) != ("run", "threads"):
                raise ValueError(
                    f"{out} holds a comparison with {section}.{key} = {old!r}, this one has {value!r}; {again}"
                )
    arms = {arm.name: arm for arm in plan.arms}
    for arm in stored.arms:
        if arms.get(arm.name) != arm:
            raise ValueError(f"{out} holds a comparison whose arm {arm.name!r} differs or is missing here; {again}")
    if not set(stored.seeds) <= set(plan.seeds):
        raise ValueError(
            f"{out} holds a comparison with the seeds {list(stored.seeds)}, got {list(plan.seeds)}; keep its seeds "
            "and add others, or choose another folder"
        )
    for key, old, value in (
        ("baseline", stored.baseline, plan.baseline),
        ("test_tokens", stored.test_tokens, plan.test_tokens),
    ):
        if old != value:
            raise ValueError(f"{out} holds a comparison with {key} = {old!r}, got {value!r}; {again}")


def prepare_data(plan: ComparisonPlan, out: Path, report: OnProgress) -> Path | None:
    """Prepare the base's source once for all cells; None if the base names prepared data."""
    data = plan.base.data
    if data.source is None:
        return None
    from varifocal.data.prepare import Options, prepare

    report(CellProgress(cell=f"preparing {plan.data_name}", done=0, cells=len(plan.cells())))
    options = Options(tokenizer=data.tokenizer, separator=data.separator, column=data.column)
    prepare(data.source, out / "data", options=options)
    return out / "data"


def train_in_processes(
    configs: dict[str, TrainingConfig], out: Path, *, workers: int, say: OnProgress
) -> dict[str, str]:
    """Train cells, each in its own process, `workers` at a time; returns why cells failed, by name."""
    waiting, failed = list(configs), {}
    running: dict[str, subprocess.Popen[bytes]] = {}
    places: dict[str, int] = {}
    done = 0
    with ExitStack() as stack:
        stack.callback(lambda: end_all(running))
        while waiting or running:
            while waiting and len(running) < workers:
                name = waiting.pop(0)
                places[name] = min(set(range(workers)) - {places[other] for other in running})
                running[name] = start(name, configs[name], out, gpu=gpu_of(places[name], workers=workers))
            time.sleep(POLL)
            for name, process in list(running.items()):
                say(progress_of(cell_folder(out, name), configs[name], done=done))
                if process.poll() is not None:
                    del running[name]
                    close(process)
                    done += 1
                    if process.returncode or not is_finished(out, name):
                        failed[name] = last_words(out / CELLS / f"{name}.log", process.returncode)
                    else:
                        write_results(out)
    return failed


def gpu_of(place: int, *, workers: int) -> str | None:
    """The GPU of the worker at a place, in turns, as CUDA_VISIBLE_DEVICES names it; None for all there are."""
    count = torch.cuda.device_count()
    if workers == 1 or not count:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else list(map(str, range(count)))
    return names[place % len(names)]


def start(name: str, config: TrainingConfig, out: Path, *, gpu: str | None) -> subprocess.Popen[bytes]:
    """Start the process of one cell, which sees that GPU alone; its output goes to cells/NAME.log."""
    file = out / CELLS / f"{name}.toml"
    write_whole(file, config.as_toml())
    with (out / CELLS / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "varifocal.experiments.cell", str(file), str(cell_folder(out, name))],
            # The cell watches this pipe: it closes when this process ends, however it ends.
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}),
        )


def close(process: subprocess.Popen[bytes]) -> None:
    """Close our end of a cell's standard input."""
    if process.stdin is not None:
        process.stdin.close()


def end_all(running: dict[str, subprocess.Popen[bytes]]) -> None:
    """Make the running cells save a checkpoint, by closing their input, and wait for them."""
    for process in running.values():
        close(process)
    for process in running.values():
        process.wait()


def progress_of(run: Path, config: TrainingConfig, *, done: int) -> CellProgress:
    """The progress of a run, from the last whole line of its metrics."""
    entry = last_entry(run / METRICS)
    return CellProgress(
        cell=run.name,
        done=done,
        cells=0,
        step=0 if entry is None else entry.step,
        steps=config.optimization.total_steps or planned_steps(entry, config),
        loss=None if entry is None else entry.validation_loss if entry.loss is None else entry.loss,
    )


def planned_steps(entry: MetricsEntry | None, config: TrainingConfig) -> int:
    """How many steps a budget in seconds will come to, as it looks at present; 0 if nothing is known yet."""
    budget = config.optimization.seconds
    if entry is None or not entry.processor_seconds or budget is None:
        return 0
    return max(entry.step, round(entry.step * budget / entry.processor_seconds))


def last_words(log: Path, code: int) -> str:
    """The last line that a failed cell wrote."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"it ended with exit code {code}; its log {log} is empty"


def measure_on_test_split(run: Path, config: TrainingConfig, *, most_tokens: int | None) -> None:
    """Write test.json into a finished run that has none: the loss on the test split and, for a probe, the recall."""
    file = run / TestRecord.filename
    if file.is_file():
        return
    from varifocal.training.evaluation import evaluate
    from varifocal.training.opening import open_model_for
    from varifocal.training.probe_accuracy import is_probe, probe_accuracy

    assert config.data.path is not None
    data = open_data(config.data.path)
    model, split, length = open_model_for(run / MODEL, data), data.split("test"), config.optimization.length
    found = evaluate(model, split, length=length, most_tokens=most_tokens)
    recall = None
    if is_probe(data):
        answers = probe_accuracy(model, split, length=length, most_tokens=most_tokens)
        recall = {str(one.distance): one.record() for one in answers}
    TestRecord(
        test_loss=found.loss, test_bits_per_byte=found.bits_per_byte, test_tokens=found.tokens, recall=recall
    ).write(file)
