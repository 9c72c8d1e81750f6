"""Scores from queries and keys other than the layer's own: what a mechanism makes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from varifocal.equations.scores.base import Pairs, Score


@dataclass(frozen=True, eq=False)
class OwnFeatures(Score):
    """queries . keys, whatever q . k is."""

    queries: Tensor
    """[B, H, T, F]."""
    keys: Tensor
    """[B, G, S, F], H a multiple of G."""

    def prepare(self, dtype: torch.dtype, blind_query: Tensor, unseen_key: Tensor) -> OwnFeatures:
        return replace(
            self,
            queries=self.queries.to(dtype).masked_fill(blind_query, 0.0),
            keys=self.keys.to(dtype).masked_fill(unseen_key, 0.0),
        )

    def of_queries(self, part: slice) -> OwnFeatures:
        return replace(self, queries=self.queries[:, :, part])

    @property
    def rates_summaries(self) -> bool:
        return False

    def rate(self, products: Tensor, pairs: Pairs) -> Tensor:
        groups = self.queries.shape[1] // max(self.keys.shape[1], 1)
        return self.queries @ self.keys.repeat_interleave(groups, dim=1).mT

    @property
    def features(self) -> int:
        return self.queries.shape[-1]

    def pair_flops(self) -> float:
        return 2.0 * self.queries.shape[-1]
