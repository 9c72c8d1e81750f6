"""The files of a comparison's folder: its plan, the test of each run, and the results."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from varifocal.results.environment import Environment
from varifocal.results.estimates import Difference, Estimate
from varifocal.results.files import FileRecord, inside
from varifocal.results.record import Record, maybe

CELLS = "cells"
"""The folder with a run directory for each cell."""


def cell_name(arm: str, seed: int) -> str:
    """The name of a cell's run directory."""
    return f"{arm}-seed{seed}"


def cell_folder(folder: Path, name: str) -> Path:
    """The run directory of a cell; ValueError for a name that leads elsewhere."""
    return inside(folder / CELLS, name, said=folder / PlanRecord.filename)


@dataclass(frozen=True, kw_only=True)
class ArmRecord(Record):
    """One row of the tables: a mechanism with its options."""

    name: str
    mechanism: str | tuple[str, ...]
    options: Any = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    reference: str | None = None
    """The arm of which this one is an ablation."""


@dataclass(frozen=True, kw_only=True)
class PlanRecord(FileRecord):
    """plan.json: what is compared. Every arm is run with every seed."""

    filename: ClassVar[str] = "plan.json"
    what: ClassVar[str] = "the plan of a comparison"

    title: str
    base: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The training config that all cells share."""
    arms: tuple[ArmRecord, ...]
    seeds: tuple[int, ...]
    baseline: str
    test_tokens: int | None = None
    smallest_effect: float | None = maybe()
    data: str
    workers: int
    environment: Environment = field(default_factory=Environment)


@dataclass(frozen=True, kw_only=True)
class Recall(Record):
    """The questions of a probe at one distance."""

    distance: int | None = maybe()
    questions: int | None = maybe()
    right: int | None = maybe()
    accuracy: float
    """The share of right answers."""


@dataclass(frozen=True, kw_only=True)
class TestRecord(FileRecord):
    """test.json: a finished run on the test split."""

    __test__ = False
    filename: ClassVar[str] = "test.json"
    what: ClassVar[str] = "the test of a run"

    test_loss: float
    test_bits_per_byte: float | None = maybe()
    test_tokens: int | None = maybe()
    recall: dict[str, Recall] | None = maybe()
    """By distance, for a probe."""


@dataclass(frozen=True, kw_only=True)
class CellRecord(Record):
    """A finished cell: the summary of its run, its loss on the test split, and its validation curve."""

    arm: str
    seed: int
    parameters: int
    steps: int
    tokens: int
    validation_loss: float
    unaveraged_loss: float | None = maybe()
    """The validation loss of the last step's own weights, where it is that of their mean over the last steps."""
    bits_per_byte: float
    seconds: float
    processor_seconds: float | None = maybe()
    """The processor's share of the training time."""
    tokens_per_second: float
    peak_bytes: int | None
    data_fingerprint: str | None
    test_loss: float | None = maybe()
    test_bits_per_byte: float | None = maybe()
    test_tokens: int | None = maybe()
    recall: dict[str, Recall] | None = maybe()
    curve: tuple[tuple[int, float], ...] = ()
    """Tokens and validation loss."""
    accuracy_curve: tuple[tuple[int, float], ...] | None = maybe()
    """Steps and the share of right answers, for a probe."""
    time_curve: tuple[tuple[float, float], ...] | None = maybe()
    """Processor seconds of training and validation loss."""


@dataclass(frozen=True, kw_only=True)
class Setting(Record):
    """Data and budget that all cells share."""

    data: str
    workers: int
    parameters: tuple[int, int]
    """The fewest and the most parameters of any cell."""
    tokens: int
    """The most tokens of any cell; so are steps."""
    steps: int
    seconds: float | None = maybe()
    """The budget of each cell in processor seconds, if that is the budget."""
    average_share: float | None = maybe()
    """The last share of training over which weights are averaged."""
    batch: int | None
    length: int | None
    precision: str | None
    preset: str | None


@dataclass(frozen=True, kw_only=True)
class ArmResult(Record):
    """What one arm reached. Estimates are over seeds."""

    name: str
    reference: str | None
    seeds: tuple[int, ...]
    parameters: int
    validation_loss: Estimate
    unaveraged_loss: Estimate | None = maybe()
    """Of the last step's own weights, where the saved ones are a mean over the last steps."""
    difference: Difference | None
    """The difference from the baseline in validation loss; None for the baseline itself."""
    adjusted_p: float | None
    """The p-value of that difference after Holm's correction for all arms."""
    to_reference: Difference | None
    bits_per_byte: Estimate
    test_loss: Estimate | None
    test_difference: Difference | None
    peak_bytes: Estimate | None
    memory_ratio: float | None
    tokens_per_second: Estimate
    speed_ratio: float | None
    seconds: Estimate
    processor_seconds: Estimate | None = maybe()
    tokens: Estimate | None = maybe()
    """Tokens of training, if the budget is one in seconds."""
    loss_at_time: Estimate | None = maybe()
    """The validation loss when the baseline of the same seed ended, by processor seconds of training."""
    difference_at_time: Difference | None = maybe()
    adjusted_p_at_time: float | None = maybe()
    recall: dict[str, Estimate]
    """Accuracy by distance, for a probe."""


@dataclass(frozen=True, kw_only=True)
class ComparisonRecord(FileRecord):
    """comparison.json: the finished cells, and the results that follow from them."""

    tag: ClassVar[tuple[str, str]] = ("experiment", "comparison")
    filename: ClassVar[str] = "comparison.json"
    what: ClassVar[str] = "a result of 'varifocal compare'"
    remedy: ClassVar[str] = "give its folder or its comparison.json"

    title: str
    baseline: str
    seeds: tuple[int, ...]
    setting: Setting
    environment: Environment = field(default_factory=Environment)
    arms: tuple[ArmRecord, ...]
    cells: tuple[CellRecord, ...]
    results: tuple[ArmResult, ...] = ()
    """What follows from the cells, for readers that do not use this package."""
