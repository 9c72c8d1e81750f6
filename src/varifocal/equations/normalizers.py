"""How the scores of a branch become weights that sum to 1, where that is not softmax."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Normalizer:
    """Turns the scores of the keys that a branch reads into weights.

    An equation without one takes softmax, exp(s) / sum exp(s). A backend that does not know a normalizer refuses it.
    """
