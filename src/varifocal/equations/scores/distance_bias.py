"""A number added to the score for every distance: Shaw et al., arXiv:1803.02155; ALiBi, arXiv:2108.12409."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from varifocal.equations.scores.base import Pairs, Score


@dataclass(frozen=True, eq=False)
class DistanceBias(Score):
    """q.k / sqrt(D) + table[min(x, N - 1)] for a key at distance x.

    A table for each head holds relative biases, ALiBi's slopes or a prior over distances, made by whatever is learned;
    one for each query as well holds the products of the query with relative positions.
    """

    table: Tensor
    """[H, N] or [B, H, T, N]; minus infinity for a distance that is not read."""

    def prepare(self, dtype: torch.dtype, blind_query: Tensor, unseen_key: Tensor) -> DistanceBias:
        table = self.table.to(dtype)
        return replace(self, table=table if table.ndim == 2 else table.masked_fill(blind_query, 0.0))

    def of_queries(self, part: slice) -> DistanceBias:
        return self if self.table.ndim == 2 else replace(self, table=self.table[:, :, part])

    @property
    def rates_summaries(self) -> bool:
        return False

    def rate(self, products: Tensor, pairs: Pairs) -> Tensor:
        # Later keys have negative distances, which gather does not take; they are masked in any case.
        distance = pairs.distance.clamp(0, self.table.shape[-1] - 1)  # [B, 1, T, S]
        table = self.table[None, :, None] if self.table.ndim == 2 else self.table  # [B or 1, H, T or 1, N]
        shape = torch.broadcast_shapes(table.shape[:3], distance.shape[:3])  # type: ignore[no-untyped-call]
        bias = table.expand(*shape, -1).gather(-1, distance.expand(*shape, -1))
        return products / math.sqrt(pairs.head_width) + bias

    def pair_flops(self) -> float:
        return 1.0

    def is_neutral(self) -> bool:
        return bool((self.table == self.table[..., :1]).all())
