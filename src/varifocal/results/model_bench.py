"""The result of `varifocal bench model`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from varifocal.results.environment import Environment
from varifocal.results.files import FileRecord
from varifocal.results.record import Record, named


@dataclass(frozen=True, kw_only=True)
class ModelRow(Record):
    """A contender at one pass and length."""

    name: str
    kind: str = named("pass")
    length: int
    seconds: float
    tokens_per_second: float
    spread: float
    rounds: int
    against: str
    """The contender whose speed is 1."""
    speedup: float
    peak_bytes: int | None
    memory_ratio: float | None


@dataclass(frozen=True, kw_only=True)
class ModelBench(FileRecord):
    """A result file."""

    tag: ClassVar[tuple[str, str]] = ("benchmark", "model")
    what: ClassVar[str] = "a result of 'varifocal bench model'"
    remedy: ClassVar[str] = "make one with its --json option"

    environment: Environment
    preset: str
    precision: str = "float32"
    batch: int
    baseline: str
    parameters: dict[str, int]
    """By contender."""
    notes: tuple[str, ...]
    rows: tuple[ModelRow, ...]

    def of(self, kind: str) -> list[ModelRow]:
        """The rows of a pass, in the order of the file."""
        return [row for row in self.rows if row.kind == kind]
