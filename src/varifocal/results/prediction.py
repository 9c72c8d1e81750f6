"""The result of `varifocal plan`: what a training run will take with each mechanism, and all assumptions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from varifocal.results.files import FileRecord
from varifocal.results.hardware import Assumptions, Hardware
from varifocal.results.record import Record


@dataclass(frozen=True, kw_only=True)
class TrainingSizes(Record):
    """What is to be trained, and on how many devices."""

    tokens: float
    length: int
    batch: int
    """Rows per optimizer step, over all devices."""
    devices: int
    micro_batch: int | None
    """Rows that a device computes at once; None for the most that fit."""
    precision: str
    checkpointing: bool
    execution: str


@dataclass(frozen=True, kw_only=True)
class PredictionRecord(Record):
    """What the cost model says about a training run with one mechanism."""

    parameters: int
    flops: float
    """Operations of the forward and backward pass, per token."""
    memory: dict[str, float]
    """Bytes by part, for one device."""
    room: float
    """Bytes that a device has for them."""
    micro_batch: int
    seconds: dict[str, float]
    """Seconds of an optimizer step by part, without what overlaps with other parts."""
    tokens_per_second: float
    hours: float
    cost: float | None
    """Dollars; None without a price."""
    notes: tuple[str, ...]
    peak: float
    fits: bool
    step_seconds: float
    limits: dict[str, float] = field(default_factory=dict)
    """The share of a step that each part of the device limits, the largest first."""


@dataclass(frozen=True, kw_only=True)
class PlanPrediction(FileRecord):
    """A result file."""

    what: ClassVar[str] = "a result of 'varifocal plan'"
    remedy: ClassVar[str] = "make one with its --json option"

    training: TrainingSizes
    hardware: Hardware
    assumptions: Assumptions
    predictions: dict[str, PredictionRecord]
    """By mechanism."""

    @property
    def base(self) -> PredictionRecord:
        """The prediction that the others are compared with: dense attention, or the first one."""
        return self.predictions.get("dense") or next(iter(self.predictions.values()))
