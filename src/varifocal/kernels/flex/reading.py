"""One softmax over a set of keys: what one call of FlexAttention evaluates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from varifocal.kernels.flex.key_sets import KeySet
from varifocal.kernels.flex.pair import Pair
from varifocal.kernels.flex.pair_scores import PairScore


@dataclass(frozen=True, eq=False)
class Reading:
    """Queries, keys and values, the sets whose union is read, and the score."""

    q: Tensor
    """[B, H, T, D]."""
    k: Tensor
    """[B, G, S, D]."""
    v: Tensor
    """[B, G, S, D]."""
    position: Tensor
    """int32 [B, T]."""
    start: Tensor
    """int32 [B, T]."""
    sets: tuple[KeySet, ...]
    score: PairScore

    def mask(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """FlexAttention's mask_mod: bool, whether the pair is read."""
        pair = self.pair(batch, head, query, key)
        read = self.sets[0].allows(pair)
        for more in self.sets[1:]:
            read = read | more.allows(pair)
        return read

    def rate(self, score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """FlexAttention's score_mod: the score and the log-weight of the pair, from its scaled dot product."""
        pair = self.pair(batch, head, query, key)
        return self.weighted(self.score.rate(score, pair), pair)

    def weighted(self, score: Tensor, pair: Pair) -> Tensor:
        """The score with the largest log-weight that a set gives to the pair; a set without weights gives 0."""
        weights = [member.log_weight(pair) for member in self.sets]
        if all(weight is None for weight in weights):
            return score
        # One set alone: the mask already leaves out what it does not hold.
        if len(weights) == 1 and weights[0] is not None:
            return score + weights[0]
        largest: Tensor | None = None
        for member, weight in zip(self.sets, weights, strict=True):
            allowed = member.allows(pair)
            weight = torch.where(allowed, 0.0 if weight is None else weight, float("-inf"))
            largest = weight if largest is None else torch.maximum(largest, weight)
        assert largest is not None
        # Minus infinity would reach the gradient of pairs that the mask leaves out anyway.
        return score + torch.where(largest == float("-inf"), 0.0, largest)

    def pair(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Pair:
        """The pair at these indices."""
        return Pair(batch, head, query, key, self.position[batch, query], self.start[batch, query])

    def of_queries(self, begin: int, end: int) -> Queries:
        """Indices that broadcast over all pairs of the queries begin..end."""
        device = self.q.device
        batch, heads, _, _ = self.q.shape
        return Queries(
            torch.arange(batch, device=device)[:, None, None, None],
            torch.arange(heads, device=device)[None, :, None, None],
            torch.arange(begin, end, device=device)[None, None, :, None],
            torch.arange(self.k.shape[2], device=device)[None, None, None, :],
        )


class Queries(NamedTuple):
    """Indices [B, 1, 1, 1], [1, H, 1, 1], [1, 1, T', 1] and [1, 1, 1, S]."""

    batch: Tensor
    head: Tensor
    query: Tensor
    key: Tensor
