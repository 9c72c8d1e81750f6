"""The head map of a focused model with all that it was decided by, and what it was measured to cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from varifocal.results.environment import Environment
from varifocal.results.files import FileRecord
from varifocal.results.record import Record, maybe


@dataclass(frozen=True, kw_only=True)
class FocusedHead(Record):
    """A key head and what was decided about it."""

    layer: int
    head: int
    score: float
    """The higher, the more it needs the whole text."""
    window: int | None
    """Keys that it reads, its own included; None for everything."""


@dataclass(frozen=True, kw_only=True)
class FocusMap(FileRecord):
    """focus.json in the folder of a focused model."""

    tag: ClassVar[tuple[str, str]] = ("kind", "focus map")
    filename: ClassVar[str] = "focus.json"
    what: ClassVar[str] = "the head map of 'varifocal focus'"

    source: str
    fit: dict[str, Any]
    """The plan of the fit, with its seed."""
    texts: str
    """What it was fitted on."""
    decided_by: str
    """The share, the budget or the accepted loss that was asked for."""
    sinks: int
    heads: tuple[FocusedHead, ...]
    losses: tuple[float, ...] = ()
    """Of the fit, step by step."""
    traces: tuple[tuple[float, ...], ...] = ()
    """The shares of all key heads after each step, layer by layer."""
    seconds: float | None = maybe()
    """The time of the fit; what was resumed is not counted."""
    adaptation: dict[str, Any] | None = maybe()
    environment: Environment | None = maybe()

    @property
    def share(self) -> float:
        """The share of key heads that read everything."""
        return sum(one.window is None for one in self.heads) / len(self.heads)


@dataclass(frozen=True, kw_only=True)
class MapLosses(Record):
    """What a map loses on some texts, document by document: differences between maps are paired on the same tokens."""

    name: str
    """How the heads were selected: dense, by a fit, random, layers in turn, all windowed."""
    keep: float
    """The share of key heads that read everything."""
    texts: str
    length: int
    """Tokens of a document."""
    heads: str
    """1 for each key head that reads everything, 0 for a windowed one, layer by layer."""
    documents: tuple[tuple[float, ...], ...]
    """For each document, the loss in nats a token in equal stretches of it."""
    kinds: dict[str, tuple[float | None, ...]] | None = maybe()
    """For each kind of token, the mean loss of such tokens in each document; None where there are none."""
    kind_tokens: dict[str, int] | None = maybe()
    """For each kind, how many tokens of it there are in all documents."""


@dataclass(frozen=True, kw_only=True)
class MapFacts(Record):
    """Which of the facts planted into texts a map finds."""

    name: str
    keep: float
    length: int
    heads: str
    depths: tuple[float, ...]
    """Where each fact stood, from 0 for the start of the text to 1 for its end."""
    found: str
    """1 for each fact that was found, 0 for one that was not."""


@dataclass(frozen=True, kw_only=True)
class MapRuler(Record):
    """How a map does at one of RULER's tasks, question by question, the same ones for all maps."""

    name: str
    keep: float
    task: str
    length: int
    heads: str
    scores: tuple[float, ...]
    """For each question, the share of what was asked for that the answer holds."""


@dataclass(frozen=True, kw_only=True)
class MapCache(Record):
    """The memory of a request, measured on the caches themselves."""

    name: str
    keep: float
    heads: str
    bytes: dict[str, int]
    """By length of the text, of the whole model's cache."""
    footprint: dict[str, float]
    """By length of the prompt: what is alive in each step of a request, summed over its steps, against dense."""


@dataclass(frozen=True, kw_only=True)
class MapSpeed(Record):
    """Speed after a prompt."""

    name: str
    keep: float
    length: int
    """Tokens of the prompt."""
    prefill_seconds: tuple[float, ...]
    """Of each round."""
    decode_milliseconds: float
    """Of a token; the median over rounds."""
    decode_spread: float
    """Half the distance between the quartiles, relative to the median."""
    bytes_read: int
    """Weights, and keys and values, that a token must read."""
    bound_milliseconds: float
    """What a plain loop over memory takes for as many bytes in the same rounds."""
    environment: Environment | None = maybe()


@dataclass(frozen=True, kw_only=True)
class FocusMeasure(FileRecord):
    """A result of `varifocal measure`; what is in it is not measured again."""

    tag: ClassVar[tuple[str, str]] = ("experiment", "focus")
    filename: ClassVar[str] = "measured.json"
    what: ClassVar[str] = "a result of 'varifocal measure'"

    source: str
    window: int
    sinks: int
    seed: int
    """Of the facts and of the random maps."""
    losses: tuple[MapLosses, ...] = ()
    facts: tuple[MapFacts, ...] = ()
    ruler: tuple[MapRuler, ...] = ()
    caches: tuple[MapCache, ...] = ()
    speeds: tuple[MapSpeed, ...] = ()
    environment: Environment | None = maybe()


@dataclass(frozen=True, kw_only=True)
class SaidAnswer(Record):
    """What one model said."""

    name: str
    said: str
    right: bool
    cache_bytes: int
    """Bytes of its cache after the answer, as they were held."""


@dataclass(frozen=True, kw_only=True)
class FocusQuestion(FileRecord):
    """question.json in the folder of a focused model: a fact far back in a text, asked for at its end."""

    tag: ClassVar[tuple[str, str]] = ("kind", "far question")
    filename: ClassVar[str] = "question.json"
    what: ClassVar[str] = "a question about a fact far back"

    told: str
    asked: str
    answer: str
    tokens: int
    """Of the text with the question."""
    back: int
    """How many tokens before the end of the question the fact stands."""
    answers: tuple[SaidAnswer, ...]
    tried: int = 1
    """How many questions were asked until the first model answered one; this is the last of them."""
