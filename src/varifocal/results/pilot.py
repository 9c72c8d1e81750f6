"""pilot.json in a comparison's folder: what a few cells tell about a comparison before it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from varifocal.results.environment import Environment
from varifocal.results.estimates import Difference, Estimate
from varifocal.results.files import FileRecord
from varifocal.results.record import Record, maybe


@dataclass(frozen=True, kw_only=True)
class ContextWorth(Record):
    """What the text further back than a window is worth to the baseline."""

    window: int
    """Tokens of text that predictions see at most; half as many at least."""
    worth: Estimate
    """Rise of the loss over all predictions when they see no more, over the rows that were read."""


@dataclass(frozen=True, kw_only=True)
class SeedsNeeded(Record):
    """How many seeds an effect of a size needs to show in four of five repetitions; None for more than a thousand."""

    effect: float
    seeds: int | None
    at_limit: int | None
    """The same if the spread is at its limit."""


@dataclass(frozen=True, kw_only=True)
class Pilot(FileRecord):
    """The result of a pilot."""

    tag: ClassVar[tuple[str, str]] = ("experiment", "pilot")
    filename: ClassVar[str] = "pilot.json"
    what: ClassVar[str] = "a result of 'varifocal compare --pilot'"

    environment: Environment = field(default_factory=Environment)
    baseline: str
    arm: str
    """The arm that was run beside the baseline."""
    seeds: tuple[int, ...]
    losses: dict[str, Estimate]
    """Validation loss by arm."""
    difference: Difference
    """Arm minus baseline, paired by seed; its deviation is the paired spread."""
    spread_limit: float
    """What the true paired spread stays below in four of five pilots with this outcome."""
    length: int
    """Tokens of a row."""
    context: tuple[ContextWorth, ...]
    planned_seeds: int
    planned_differences: int
    """Arms that the comparison will hold against its baseline."""
    planned_cells: int
    seconds: float
    """Of training for each cell, in the mean over the pilot's cells."""
    smallest_effect: float | None = maybe()
    needed: tuple[SeedsNeeded, ...]
