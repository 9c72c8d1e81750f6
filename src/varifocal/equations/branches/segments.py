"""Own segment in full, earlier ones in summary: Ren et al., Combiner, arXiv:2107.05768."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from varifocal.equations.branches.base import Branch, require_at_least
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
    summaries: Tensor | None = None
    """[B, H, N, 2 D]: summary key and value of the complete segments of a text that is one document, as
    `SegmentSummaries` keeps them while decoding. They change nothing but the work: a backend may read them in place of
    all keys."""

    def __post_init__(self) -> None:
        require_at_least("segment length", self.length, 1)

    @property
    def own(self) -> OwnBlock:
        """The keys that are read themselves, not in summary."""
        return OwnBlock(self.length)
