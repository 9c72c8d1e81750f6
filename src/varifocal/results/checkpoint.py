"""complete.json: the seal of a checkpoint, written last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from varifocal.results.files import FileRecord
from varifocal.results.record import Record


@dataclass(frozen=True, kw_only=True)
class CheckpointState(Record):
    """What a run remembers besides its weights and its optimizer."""

    step: int
    seconds: float
    """Training time so far."""
    processor_seconds: float = 0.0
    """Processor time of training so far."""
    peak_bytes: int
    """Peak memory so far."""


@dataclass(frozen=True, kw_only=True)
class SealedFile(Record):
    """A file of the checkpoint as it was written."""

    size: int
    checksums: str


@dataclass(frozen=True, kw_only=True)
class Seal(FileRecord):
    """Sizes and checksums of all other files, and the state of the run."""

    filename: ClassVar[str] = "complete.json"
    what: ClassVar[str] = "the seal of a checkpoint"
    indent: ClassVar[int | None] = None

    state: CheckpointState
    files: dict[str, SealedFile]
