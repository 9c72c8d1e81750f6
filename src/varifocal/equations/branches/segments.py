"""Own segment in full, earlier ones in summary: Ren et al., Combiner, arXiv:2107.05768."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from varifocal.equations.branches.base import Branch, both_by_head, require_at_least
from varifocal.equations.branches.own_block import OwnBlock


@dataclass(frozen=True, eq=False)
class Segments(Branch):
    """The keys of the query's own segment, and one summary for each earlier segment of its document.

    A summary's key is the elementwise maximum of the segment's keys; its value is what the elementwise
    maximum of the segment's queries reads there: softmax(max q . K) V.
    """

    length: int
    """Keys in a segment."""
    queries: Tensor | None = None
    """[B, H, S, D]: the queries that stood at each key. None: the call's own queries, one for each key."""

    def __post_init__(self) -> None:
        require_at_least("segment length", self.length, 1)

    def near(self, place: Tensor) -> Tensor:
        return self.own.near(place)

    def count(self, place: Tensor, *, beyond: Tensor | int = 0) -> Tensor:
        summaries = torch.div(place, self.length, rounding_mode="floor")
        return torch.add(*both_by_head(self.own.count(place, beyond=beyond), summaries.clamp(min=0)))

    def rating_flops(self, place: Tensor, head_width: int) -> Tensor:
        """A segment's summary value is one query's attention to its keys, spread over its tokens."""
        return torch.full_like(place, 4 * head_width)

    @property
    def own(self) -> OwnBlock:
        """The keys that are read themselves, not in summary."""
        return OwnBlock(self.length)
