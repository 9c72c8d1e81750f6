"""The result of `varifocal bench decode`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from varifocal.results.environment import Environment
from varifocal.results.estimates import Difference, Estimate
from varifocal.results.files import FileRecord
from varifocal.results.record import Record


@dataclass(frozen=True, kw_only=True)
class DecodeRow(Record):
    """A contender that decodes a token for each of some texts, after so many tokens of each."""

    name: str
    context: int
    texts: int
    milliseconds: float
    """Of a step, which gives each text a token: the median over rounds."""
    spread: float
    tokens_per_second: float
    """Of all texts together."""
    processor_milliseconds: float
    """Of a step, over all threads."""
    against: str
    """The contender whose speed is 1."""
    speedup: float
    bytes_read: int | None
    """Weights, and the keys and values that are kept; None where they cannot be seen."""
    bandwidth_share: float | None
    """bytes_read in a second as a share of what a plain loop over memory read in the same rounds."""
    first_token_seconds: float | None
    """From the prompt to its first token; None where the cache was filled with random keys and values instead."""


@dataclass(frozen=True, kw_only=True)
class LossOfWeights(Record):
    """What holding the weights otherwise costs on real text, document by document."""

    weights: str
    text: str
    tokens: int
    loss: Estimate
    """Nats a token with the weights as they were saved; the mean over documents."""
    difference: Difference
    """What is added to it."""


@dataclass(frozen=True, kw_only=True)
class SpeculationRow(Record):
    """Generation that proposes several tokens and keeps those that the model itself would have chosen."""

    name: str
    kind: str
    prompt: str
    """A running text, or one that begins to repeat itself."""
    context: int
    """Tokens of the prompt."""
    tokens: int
    calls: int
    """Of the model, for all tokens."""
    speedup: float
    """Against the same model's plain greedy generation in the same run, once the prompt is read."""
    same_text: bool


@dataclass(frozen=True, kw_only=True)
class DecodeBench(FileRecord):
    """A result file."""

    tag: ClassVar[tuple[str, str]] = ("benchmark", "decode")
    what: ClassVar[str] = "a result of 'varifocal bench decode'"
    remedy: ClassVar[str] = "make one with its --json option"

    environment: Environment
    source: str
    rounds: int
    tokens: int
    """Decoded in each round."""
    memory_gigabytes_per_second: float
    """What a plain loop over a buffer read, on the same threads: the median over all rounds."""
    weight_bytes: dict[str, int]
    """Of all weights, by contender."""
    notes: tuple[str, ...]
    rows: tuple[DecodeRow, ...]
    losses: tuple[LossOfWeights, ...] = ()
    speculation: tuple[SpeculationRow, ...] = ()

    def of(self, texts: int) -> list[DecodeRow]:
        """The rows of so many texts at once, in the order of the file."""
        return [row for row in self.rows if row.texts == texts]
