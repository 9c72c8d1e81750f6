"""The head map of a focused model with all that it was decided by, and what it was measured to cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from varifocal.results.environment import Environment
from varifocal.results.estimates import Difference, Estimate
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
class FocusRow(Record):
    """One map, measured against the dense model."""

    name: str
    """How the heads were selected: fitted, random, layers in turn, all windowed."""
    keep: float
    """The share of key heads that read everything."""
    loss: Difference
    """Rise of the loss over the dense model, in nats a token, over documents."""
    far_loss: Difference
    """The same in the second half of the texts, where the windows bind most."""
    found: Estimate | None = maybe()
    """Facts found, of those that the dense model finds."""
    found_by_length: dict[str, float] = field(default_factory=dict)
    found_by_depth: tuple[float | None, ...] | None = maybe()
    cache: dict[str, float] = field(default_factory=dict)
    """By length, the bytes of the cache against dense."""


@dataclass(frozen=True, kw_only=True)
class FocusMeasure(FileRecord):
    """A result of `varifocal focus --measure`."""

    tag: ClassVar[tuple[str, str]] = ("experiment", "focus")
    what: ClassVar[str] = "a result of 'varifocal focus --measure'"

    source: str
    texts: str
    """What was measured on."""
    length: int
    documents: int
    dense_loss: Estimate
    dense_curve: tuple[float, ...]
    """The dense model's own loss in each eighth of the texts."""
    dense_found: dict[str, float]
    """By length, the share of facts that the dense model finds."""
    rows: tuple[FocusRow, ...]
    environment: Environment | None = maybe()
