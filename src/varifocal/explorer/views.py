"""What the page asks and what it gets: frozen values, sent as JSON."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from varifocal.explorer.reading import Gates


class TextQuestion(BaseModel):
    """Show a text in one head of one layer."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    text: str
    model: int = Field(default=0, ge=0)
    gates: Gates = "learned"
    layer: int = Field(default=0, ge=0)
    head: int = Field(default=0, ge=0)


class TokenQuestion(TextQuestion):
    """Show what one token of the text reads there, what comes next, or what it reads far back."""

    token: int = Field(ge=0)


@dataclass(frozen=True)
class LayerView:
    """The mechanism of a layer, in words."""

    mechanism: str
    gated: bool
    words: str
    """What it reads."""
    windows: tuple[int | None, ...] = ()
    """Of each head, if all tokens share one; None for a head that reads everything."""


@dataclass(frozen=True)
class ModelView:
    """A model that the page can ask."""

    name: str
    parameters: int
    heads: int
    context: int
    """Tokens of the longest text that it was made for."""
    most: int
    """The most tokens that it reads here."""
    layers: tuple[LayerView, ...]

    @property
    def gated(self) -> bool:
        """Whether any layer has a gate."""
        return any(layer.gated for layer in self.layers)


@dataclass(frozen=True)
class TextView:
    """A text in one head; every list has one entry for each token."""

    pieces: list[str]
    starts: list[int]
    added: dict[int, str]
    gate: list[float] | None
    """1 reads only the local branch, 0 only the global one; None without a gate."""
    decides: list[bool] | None
    """False where both branches read the same keys."""
    width: list[float] | None
    """Keys of each token's window, if windows differ between tokens."""
    window: int | None
    """Keys of every token's window, if all are the same."""
    edge: int
    """Keys over which a window fades out."""
    gate_map: list[list[float | None] | None]
    """The mean gate of each layer and head over the tokens where it decides; None if it decides nowhere, and for layers
    without a gate."""
    beyond: bool
    """Whether the text is longer than the texts that the model was made for."""


@dataclass(frozen=True)
class KeyView:
    """A key that a token reads."""

    token: int
    weight: float
    local_part: float | None
    global_part: float | None


@dataclass(frozen=True)
class Candidate:
    """A token that may come next."""

    text: str
    probability: float
    follows: bool
    """Whether the text continues with this token."""


@dataclass(frozen=True)
class NextView:
    """What comes next, with the gates in one state."""

    gates: Gates
    candidates: tuple[Candidate, ...]
    following: float | None
    """The probability of the token that follows in the text; None at its end."""


@dataclass(frozen=True)
class TokenView:
    """One token in one head."""

    token: int
    weights: list[float]
    """How much it reads of each key, from the first key to its own."""
    keys: tuple[KeyView, ...]
    """The keys that it reads most, in descending order."""


@dataclass(frozen=True)
class FarView:
    """What one token reads far back."""

    token: int
    shares: list[list[float]]
    """By layer and head, the share that this token reads from further back than `Explorer.near`."""
