"""The result of `varifocal evaluate`: a model's loss on prepared data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from varifocal.results.comparison import Recall
from varifocal.results.files import FileRecord
from varifocal.results.record import Record, maybe


@dataclass(frozen=True, kw_only=True)
class CurvePoint(Record):
    """The loss of the tokens that are predicted from `least` to `most` tokens of their document."""

    least: int
    most: int
    loss: float
    spread: float
    """The standard error of the loss, as if tokens were independent."""
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Evaluation(FileRecord):
    """A result file."""

    what: ClassVar[str] = "a result of 'varifocal evaluate'"
    remedy: ClassVar[str] = "make one with its --json option"

    model: str | None = maybe()
    data: str | None = maybe()
    split: str | None = maybe()
    loss: float
    """Nats a token, averaged over all predicted tokens or, for a probe, over the answers."""
    perplexity: float
    bits_per_byte: float
    tokens: int
    """Tokens that were predicted; the first token of a document or row is not."""
    length: int
    curve: tuple[CurvePoint, ...]
    accuracy: float | None = maybe()
    """The share of right answers, for a probe."""
    recall: tuple[Recall, ...] | None = maybe()
    """By distance, for a probe."""
