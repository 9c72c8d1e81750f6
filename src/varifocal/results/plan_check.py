"""The result of `varifocal bench plan`: measured steps beside the predictions of the cost model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from varifocal.results.environment import Environment
from varifocal.results.files import FileRecord
from varifocal.results.hardware import Hardware
from varifocal.results.record import Record


@dataclass(frozen=True, kw_only=True)
class PlanRow(Record):
    """A training step of one row of text."""

    preset: str
    length: int
    name: str
    seconds: float
    spread: float
    rounds: int
    peak_bytes: int | None
    predicted_seconds: float = 0.0
    predicted_parts: dict[str, float] = field(default_factory=dict)
    predicted_bytes: float = 0.0
    predicted_memory: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PlanCheck(FileRecord):
    """A result file."""

    tag: ClassVar[tuple[str, str]] = ("benchmark", "plan")
    what: ClassVar[str] = "a result of 'varifocal bench plan'"
    remedy: ClassVar[str] = "make one with its --json option"

    environment: Environment
    context: int
    """The context that the mechanisms' options are scaled to."""
    clock: str
    """wall, or processor."""
    machine: Hardware
    rows: tuple[PlanRow, ...]
