"""The result of `varifocal data inspect`: what a data set holds, and how much of it lies beyond a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from varifocal.results.files import FileRecord
from varifocal.results.record import Record, named


@dataclass(frozen=True, kw_only=True)
class LengthBin(Record):
    """The documents in a range of lengths."""

    least: int = named("from")
    most: int = named("to")
    documents: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class SplitReport(Record):
    """One split. Lengths are in tokens, the end of each document included."""

    documents: int
    tokens: int
    bytes: int
    bytes_per_token: float
    mean_length: float
    quantiles: dict[str, int]
    longest: int
    documents_longer_than_window: float
    tokens_beyond_window: float
    histogram: tuple[LengthBin, ...]


@dataclass(frozen=True, kw_only=True)
class SampleDocument(Record):
    """The beginning of a document."""

    split: str
    document: int
    tokens: int
    bytes: int
    text: str


@dataclass(frozen=True, kw_only=True)
class TokenizerName(Record):
    """Which tokenizer made the tokens."""

    name: str
    vocabulary: int
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class DataReport(FileRecord):
    """A result file."""

    tag: ClassVar[tuple[str, str]] = ("report", "data")
    what: ClassVar[str] = "a result of 'varifocal data inspect'"
    remedy: ClassVar[str] = "make one with its --json option"
    ascii: ClassVar[bool] = False

    kind: str
    source: str
    fingerprint: str
    tokenizer: TokenizerName
    left_out: dict[str, int]
    """Documents without text, and documents in which invalid bytes were replaced."""
    window: int
    splits: dict[str, SplitReport]
    samples: tuple[SampleDocument, ...]
