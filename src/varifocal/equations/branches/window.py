"""The query's own key and the keys just before it: Beltagy et al., Longformer, arXiv:2004.05150."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from varifocal.equations.branches.base import Branch, FixedBranch, less
from varifocal.equations.branches.head_sizes import HeadSizes, for_heads, largest_size, require_sizes


@dataclass(frozen=True)
class Window(FixedBranch):
    """The last `size` keys, the query's own included: query - size < key <= query."""

    size: HeadSizes
    """Keys each query may read, its own included; or a tuple with a number for each query head, None for all keys."""

    def __post_init__(self) -> None:
        require_sizes("window size", self.size, least=1)

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        return query - key < for_heads(self.size, key, pairs=True)

    def near(self, place: Tensor) -> Tensor:
        sizes = for_heads(self.size, place)
        return (place if isinstance(sizes, int) else place.unsqueeze(-2)).add(1).clamp(min=0).clamp(max=sizes)

    def count(self, place: Tensor, *, beyond: Tensor | int = 0) -> Tensor:
        return less(self.near(place), beyond)

    def farthest(self) -> int | None:
        return largest_size(self.size)

    reads_everything = Branch.reads_everything
