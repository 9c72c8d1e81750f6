"""The result of `varifocal bench data`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from varifocal.results.environment import Environment
from varifocal.results.files import FileRecord
from varifocal.results.record import Record


@dataclass(frozen=True, kw_only=True)
class ReadData(Record):
    """The data set that was read."""

    documents: int
    tokens: int
    token_bytes: int
    source: Any
    """Where the data came from, as the manifest says."""
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class ReadingRow(Record):
    """A way of reading, at one row length."""

    name: str
    length: int
    tokens_per_second: float
    ratio: float
    """The speed relative to the baseline in the same run."""
    spread: float
    rounds: int


@dataclass(frozen=True, kw_only=True)
class DataBench(FileRecord):
    """A result file."""

    tag: ClassVar[tuple[str, str]] = ("benchmark", "data")
    what: ClassVar[str] = "a result of 'varifocal bench data'"
    remedy: ClassVar[str] = "make one with its --json option"

    environment: Environment
    data: ReadData
    baseline: str
    aim: float
    """The tokens a second that one core should reach."""
    batch_tokens: int
    rows: tuple[ReadingRow, ...]
