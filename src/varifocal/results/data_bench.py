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
    """As its manifest tells it."""
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class ReadingRow(Record):
    """A way of reading at one length of a row."""

    name: str
    length: int
    tokens_per_second: float
    ratio: float
    """To the baseline in the same run."""
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
    """Tokens a second."""
    batch_tokens: int
    rows: tuple[ReadingRow, ...]
