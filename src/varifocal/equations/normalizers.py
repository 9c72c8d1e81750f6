"""How the scores of a branch become weights that sum to 1."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Normalizer:
    """Turns the scores of the keys that a branch reads into weights."""


@dataclass(frozen=True)
class Softmax(Normalizer):
    """exp(s) / sum exp(s)."""
