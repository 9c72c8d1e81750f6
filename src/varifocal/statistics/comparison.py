"""Estimates from the cells of a comparison: what each arm reached over its seeds, and how it differs from others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from varifocal.results.comparison import (
    ArmRecord,
    ArmResult,
    CellRecord,
    ComparisonRecord,
    PlanRecord,
    Setting,
    TestRecord,
    cell_folder,
    cell_name,
)
from varifocal.results.estimates import Difference
from varifocal.results.metrics import METRICS, accuracy_curve, read_metrics, validation_curve, validation_times
from varifocal.results.run import RunSummary, read_settings
from varifocal.statistics.estimates import estimate, holm, paired_difference

Value = Callable[[CellRecord], float | None]
"""A number of a cell; None if the cell does not have it."""


def loss(cell: CellRecord) -> float:
    """The number that arms are compared by."""
    return cell.validation_loss


@dataclass(frozen=True)
class Comparison:
    """The finished cells of a comparison, and what follows from them."""

    record: ComparisonRecord

    @property
    def title(self) -> str:
        return self.record.title

    @property
    def baseline(self) -> str:
        return self.record.baseline

    @property
    def setting(self) -> Setting:
        """Data and budget that all cells share."""
        return self.record.setting

    @property
    def command(self) -> str:
        """The command that made it; empty if it is not known."""
        return self.record.environment.command

    def cells(self, arm: str) -> dict[int, CellRecord]:
        """The finished cells of an arm by seed."""
        return {cell.seed: cell for cell in self.record.cells if cell.arm == arm}

    @cached_property
    def results(self) -> tuple[ArmResult, ...]:
        """The result of each arm that has a finished cell, in the order of the plan."""
        arms = [arm for arm in self.record.arms if self.cells(arm.name)]
        differences = [self.difference(arm.name, self.baseline, loss) for arm in arms]
        at_time = [self.difference(arm.name, self.baseline, self.loss_at_time) for arm in arms]
        adjusted, adjusted_at_time = (
            holm([None if one is None else one.p_value for one in found]) for found in (differences, at_time)
        )
        return tuple(
            replace(self.result(arm, difference, p), difference_at_time=timed, adjusted_p_at_time=timed_p)
            for arm, difference, p, timed, timed_p in zip(
                arms, differences, adjusted, at_time, adjusted_at_time, strict=True
            )
        )

    def result(self, arm: ArmRecord, difference: Difference | None, adjusted_p: float | None) -> ArmResult:
        """The estimates of one arm."""
        name, reference = arm.name, arm.reference
        cells = list(self.cells(name).values())
        tests, peaks = known(cell.test_loss for cell in cells), known(cell.peak_bytes for cell in cells)
        recalls = [cell.recall or {} for cell in cells]
        timed = known(map(self.loss_at_time, cells))
        unaveraged = known(cell.unaveraged_loss for cell in cells)
        processor = known(cell.processor_seconds for cell in cells)
        return ArmResult(
            name=name,
            reference=reference,
            seeds=tuple(cell.seed for cell in cells),
            parameters=cells[0].parameters,
            validation_loss=estimate([cell.validation_loss for cell in cells]),
            unaveraged_loss=estimate(unaveraged) if unaveraged else None,
            difference=difference,
            adjusted_p=adjusted_p,
            to_reference=None if reference is None else self.difference(name, reference, loss),
            bits_per_byte=estimate([cell.bits_per_byte for cell in cells]),
            test_loss=estimate(tests) if tests else None,
            test_difference=self.difference(name, self.baseline, lambda cell: cell.test_loss),
            peak_bytes=estimate(peaks) if peaks else None,
            memory_ratio=self.ratio(name, lambda cell: cell.peak_bytes),
            tokens_per_second=estimate([cell.tokens_per_second for cell in cells]),
            speed_ratio=self.ratio(name, lambda cell: cell.tokens_per_second),
            seconds=estimate([cell.seconds for cell in cells]),
            processor_seconds=estimate(processor) if processor else None,
            tokens=None if self.setting.seconds is None else estimate([cell.tokens for cell in cells]),
            loss_at_time=estimate(timed) if timed else None,
            recall={
                distance: estimate([one[distance].accuracy for one in recalls if distance in one])
                for distance in recalls[0]
            },
        )

    def loss_at_time(self, cell: CellRecord) -> float | None:
        """The loss of a cell when the baseline of its seed ended; None if the times are not known."""
        baseline = self.cells(self.baseline).get(cell.seed)
        if baseline is None or baseline.processor_seconds is None or not cell.time_curve:
            return None
        return loss_at(cell.time_curve, baseline.processor_seconds)

    def pairs(self, arm: str, other: str, value: Value) -> tuple[list[float], list[float]]:
        """A number of two arms, for the seeds that both have."""
        ours, theirs = self.cells(arm), self.cells(other)
        both = [(value(ours[seed]), value(theirs[seed])) for seed in ours if seed in theirs]
        paired = [(one, two) for one, two in both if one is not None and two is not None]
        return [one for one, _ in paired], [two for _, two in paired]

    def difference(self, arm: str, other: str, value: Value) -> Difference | None:
        """The paired difference of two arms; None if they share no seed or are one arm."""
        ours, theirs = self.pairs(arm, other, value)
        return paired_difference(ours, theirs) if ours and arm != other else None

    def ratio(self, arm: str, value: Value) -> float | None:
        """The mean of an arm over that of the baseline, for the seeds that both have."""
        ours, theirs = self.pairs(arm, self.baseline, value)
        return sum(ours) / sum(theirs) if sum(theirs) else None

    def with_results(self) -> ComparisonRecord:
        """The record as it is written: with the estimates, for readers that do not use this package."""
        return replace(self.record, results=self.results)


def loss_at(curve: tuple[tuple[float, float], ...], seconds: float) -> float | None:
    """The loss at a time, on the line between the validations around it.

    After the last validation it stays as it is: a run that has ended learns nothing more. None before the first one.
    """
    if seconds < curve[0][0]:
        return None
    for (before, loss_before), (after, loss_after) in pairwise(curve):
        if before <= seconds < after:
            return loss_before + (loss_after - loss_before) * (seconds - before) / (after - before)
    return curve[-1][1]


def known(values: Iterable[float | None]) -> list[float]:
    """The values without those that are None."""
    return [value for value in values if value is not None]


def gather_comparison(folder: Path) -> Comparison:
    """The finished cells of a comparison folder; ValueError if there is none."""
    plan = PlanRecord.read(folder / PlanRecord.filename)
    cells = [
        read_cell(folder, arm.name, seed)
        for arm in plan.arms
        for seed in plan.seeds
        if (cell_folder(folder, cell_name(arm.name, seed)) / RunSummary.filename).is_file()
    ]
    if not cells:
        raise ValueError(f"no cell of {folder} is finished; run the same comparison again to continue it")
    return Comparison(
        ComparisonRecord(
            title=plan.title,
            baseline=plan.baseline,
            seeds=plan.seeds,
            setting=shared_setting(folder, plan, cells),
            environment=plan.environment,
            arms=plan.arms,
            cells=tuple(cells),
        )
    )


def read_comparison(path: Path) -> Comparison:
    """The comparison of a comparison.json, or of a folder that holds one; ValueError for anything else."""
    file = path / ComparisonRecord.filename if path.is_dir() else path
    found = Comparison(ComparisonRecord.read(file))
    if not found.results:
        raise ValueError(f"{file} has no finished cell of its arms; run the comparison again")
    return found


def read_cell(folder: Path, arm: str, seed: int) -> CellRecord:
    """The summary of a finished run, its loss on the test split, and its validation curve."""
    run = cell_folder(folder, cell_name(arm, seed))
    metrics = read_metrics(run / METRICS)
    summary = RunSummary.read(run / RunSummary.filename)
    cell = CellRecord(
        arm=arm,
        seed=seed,
        parameters=summary.parameters,
        steps=summary.steps,
        tokens=summary.tokens,
        validation_loss=summary.validation_loss,
        unaveraged_loss=summary.unaveraged_loss,
        bits_per_byte=summary.bits_per_byte,
        seconds=summary.seconds,
        processor_seconds=summary.processor_seconds,
        tokens_per_second=summary.tokens_per_second,
        peak_bytes=summary.peak_bytes,
        data_fingerprint=summary.data_fingerprint,
        curve=validation_curve(metrics),
        accuracy_curve=accuracy_curve(metrics) or None,
        time_curve=validation_times(metrics) or None,
    )
    if not (run / TestRecord.filename).is_file():
        return cell
    test = TestRecord.read(run / TestRecord.filename)
    return replace(
        cell,
        test_loss=test.test_loss,
        test_bits_per_byte=test.test_bits_per_byte,
        test_tokens=test.test_tokens,
        recall=test.recall,
    )


def shared_setting(folder: Path, plan: PlanRecord, cells: list[CellRecord]) -> Setting:
    """The sizes and the budget that every cell shares."""
    settings = read_settings(cell_folder(folder, cell_name(cells[0].arm, cells[0].seed)))
    counts = [cell.parameters for cell in cells]
    return Setting(
        data=plan.data,
        workers=plan.workers,
        parameters=(min(counts), max(counts)),
        tokens=max(cell.tokens for cell in cells),
        steps=max(cell.steps for cell in cells),
        seconds=settings.optimization.seconds,
        average_share=settings.optimization.average_share or None,
        batch=settings.optimization.batch,
        length=settings.optimization.length,
        precision=settings.optimization.precision,
        preset=settings.model.preset,
    )
