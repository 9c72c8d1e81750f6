"""What the page asks and what it is told: frozen values, sent as JSON."""

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
    """Show what one token of the text reads there, and what comes next."""

    token: int = Field(ge=0)


@dataclass(frozen=True)
class LayerView:
    """The mechanism of a layer, in words."""

    mechanism: str
    gated: bool
    words: str
    """What it reads."""


@dataclass(frozen=True)
class ModelView:
    """A model that the page can ask."""

    name: str
    parameters: int
    heads: int
    context: int
    """Tokens of the texts it was made for."""
    most: int
    """Tokens it reads here at most."""
    layers: tuple[LayerView, ...]

    @property
    def gated(self) -> bool:
        """Whether any layer has a gate."""
        return any(layer.gated for layer in self.layers)


@dataclass(frozen=True)
class TextView:
    """A text in one head: one entry for each token in every list."""

    pieces: list[str]
    starts: list[int]
    added: dict[int, str]
    gate: list[float] | None
    """1 reads the local branch alone, 0 the global one; None without a gate."""
    decides: list[bool] | None
    """False where both branches read the same keys."""
    width: list[float] | None
    """Keys of each token's window, where they differ."""
    window: int | None
    """Keys of every token's window, where they do not."""
    edge: int
    """Keys over which a window fades out."""
    gate_map: list[list[float | None] | None]
    """For each layer and head the mean gate of the tokens where it decides; None where none does, and for layers
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
    """Whether it is the one that the text goes on with."""


@dataclass(frozen=True)
class NextView:
    """What comes next, under one state of the gates."""

    gates: Gates
    candidates: tuple[Candidate, ...]
    following: float | None
    """The probability of the token that the text goes on with; None at its end."""


@dataclass(frozen=True)
class TokenView:
    """One token in one head."""

    token: int
    weights: list[float]
    """How much of each key it reads, from the first key to its own."""
    keys: tuple[KeyView, ...]
    """Those it reads most, the most first."""
    next: tuple[NextView, ...]
