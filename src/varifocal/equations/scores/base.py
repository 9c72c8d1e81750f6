"""What all scores share: a rating of every pair of a query and a key."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from varifocal.equations.kinds import refuse_known_parents


class Pairs(NamedTuple):
    """The pairs of queries and keys that a score rates, besides their dot products."""

    query: Tensor
    """int64 [B, 1, T, 1]: the query's place in its document, counted from 0."""
    key: Tensor
    """int64 [B, 1, T, S]: the key's place, counted from the start of the query's document; negative before it."""
    head_width: int
    """D."""

    @property
    def distance(self) -> Tensor:
        """int64 [B, 1, T, S]: how far before its query a key lies; negative for later keys, which are never read."""
        return self.query - self.key


@dataclass(frozen=True)
class Score:
    """Rates every pair of a query and a key, from their dot product, their places and whatever else it carries."""

    def __init_subclass__(cls) -> None:
        refuse_known_parents(cls, "Score")

    def rate(self, products: Tensor, pairs: Pairs) -> Tensor:
        """Scores [B, H, T, S] from dot products q.k [B, H, T, S]; minus infinity where a pair is not read."""
        raise NotImplementedError

    def rate_blocks(self, products: Tensor, *, head_width: int) -> Tensor:
        """Scores of blocks of keys (their mean, or a summary), which have no place of their own."""
        return products / math.sqrt(head_width)

    @property
    def rates_summaries(self) -> bool:
        """Whether a summary of keys can be rated like a key."""
        return True

    def prepare(self, dtype: torch.dtype, blind_query: Tensor, unseen_key: Tensor) -> Score:
        """The same score in the given type, with 0 for queries [B, 1, T, 1] and keys [B, 1, S, 1] that do not count."""
        return self

    def of_queries(self, part: slice) -> Score:
        """The score of some of the queries."""
        return self

    @property
    def features(self) -> int | None:
        """The width of its own queries and keys, if it is a product of such; None for one of q and k."""
        return None

    def pair_flops(self) -> float:
        """Operations of one pair beside its dot product."""
        return 0.0

    def pair_functions(self) -> float:
        """Exponentials, and functions like them, of one pair beside that of the softmax."""
        return 0.0

    def is_neutral(self) -> bool:
        """Whether softmax sees the scores of dense attention, q.k / sqrt(D), but for what all keys of a query share."""
        return False
