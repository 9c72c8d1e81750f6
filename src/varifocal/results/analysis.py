"""The result of `varifocal analyze`: what heads read and gates decide, with intervals over documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from varifocal.results.environment import Environment
from varifocal.results.files import FileRecord
from varifocal.results.record import Record, maybe, named

Grid = tuple[tuple[float | None, ...], ...]
"""[L, H]: a number for each layer and head, None where there is none."""
Shares = tuple[tuple[tuple[float | None, ...], ...], ...]
"""[L, H, D]."""


@dataclass(frozen=True, kw_only=True)
class HeadMeans(Record):
    """Means with their 95 % intervals."""

    mean: Grid
    low: Grid
    high: Grid


@dataclass(frozen=True, kw_only=True)
class DistanceShares(Record):
    """Shares by distance."""

    bins: tuple[tuple[int, int], ...]
    """The least and the largest distance of each bin."""
    shares: Shares


@dataclass(frozen=True, kw_only=True)
class WidthShares(Record):
    """A histogram of widths."""

    edges: tuple[float, ...]
    shares: Shares


@dataclass(frozen=True, kw_only=True)
class Selection(Record):
    """The share of dense attention that a window and top-k recover, at queries beyond the window."""

    queries: int
    uniform: float
    """The share that a head without any preference would have inside the window."""
    window: HeadMeans
    top_k: HeadMeans
    window_or_top_k: HeadMeans
    selected: HeadMeans | None = maybe("chosen")
    """The share on the keys that the mechanism's own top-k selected."""
    first: HeadMeans
    distance: HeadMeans
    reach: tuple[tuple[str, ...], ...]
    """local, global, first token or mixed."""
    shares: DistanceShares

    def recovered(self) -> dict[str, HeadMeans]:
        """The shares that were measured, by name."""
        known = {
            "window": self.window,
            "top-k": self.top_k,
            "either": self.window_or_top_k,
            "selected": self.selected,
            "first token": self.first,
        }
        return {name: means for name, means in known.items() if means is not None}


@dataclass(frozen=True, kw_only=True)
class KindRow(Record):
    """Tokens of a kind compared with others at equal position, averaged over all heads."""

    kind: str
    against: str
    tokens: int
    documents: int
    mean: float | None
    difference: float | None
    low: float | None
    high: float | None
    effect: float | None
    """The difference in standard deviations between tokens."""
    p: float | None
    p_holm: float | None


@dataclass(frozen=True, kw_only=True)
class HeadKindRow(Record):
    """The same, head by head."""

    kind: str
    difference: Grid
    effect: Grid
    p: Grid
    p_holm: Grid


@dataclass(frozen=True, kw_only=True)
class PositionRow(Record):
    """The tokens with `least` to `most` others before them."""

    least: int
    most: int
    tokens: int
    mean: float | None
    low: float | None
    high: float | None
    layers: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class Quantity(HeadMeans):
    """A gate, width, distance or mass by kind of token, by head and by position."""

    meaning: str
    deviation: Grid
    by_kind: tuple[KindRow, ...]
    by_kind_and_head: tuple[HeadKindRow, ...]
    by_position: tuple[PositionRow, ...]


@dataclass(frozen=True, kw_only=True)
class ContextGain(Record):
    """What the text beyond the window is worth, in nats."""

    tokens: int
    mean: float | None
    low: float | None
    high: float | None
    clear: float
    """The gain above which far text counts as helping."""
    helps: float | None
    """The share of predictions that far text helps."""
    harms: float | None
    by_kind: tuple[KindRow, ...]


@dataclass(frozen=True, kw_only=True)
class KindCount(Record):
    """A kind of token, and how many there are."""

    kind: str
    definition: str
    among: str | None
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Analysis(FileRecord):
    """An analysis file."""

    tag: ClassVar[tuple[str, str]] = ("experiment", "analysis")
    what: ClassVar[str] = "a result of 'varifocal analyze'"
    remedy: ClassVar[str] = "make one with its -o option"
    indent: ClassVar[int | None] = None

    environment: Environment
    mechanism: str | tuple[str, ...]
    mechanism_options: Any = None
    layers: int
    heads: int
    data: str
    data_fingerprint: str = ""
    split: str
    length: int
    window: int
    k_scale: float
    k_min: int
    resamples: int
    seed: int
    tokens: int
    documents: int
    kinds: tuple[KindCount, ...]
    selection: Selection
    quantities: dict[str, Quantity]
    context_gain: ContextGain
    width_shares: WidthShares | None
    selected_shares: DistanceShares | None = named("chosen_shares")
    model: str | None = maybe()
    """The model as it was named on the command line."""

    def setting(self) -> str:
        """One line: what was read."""
        return (
            f"{self.tokens:,} tokens of {self.documents} documents of the {self.split} split of {self.data}, "
            f"rows of {self.length}, window {self.window}; 95 % intervals from {self.resamples} resamplings of "
            "documents"
        )
