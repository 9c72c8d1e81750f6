"""The keys just behind the query: Beltagy et al., Longformer, arXiv:2004.05150."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from varifocal.equations.branches.base import FixedBranch, require_at_least


@dataclass(frozen=True)
class Window(FixedBranch):
    """The last `size` keys, the query's own included: query - size < key <= query."""

    size: int
    """Keys each query may read, its own included."""

    def __post_init__(self) -> None:
        require_at_least("window size", self.size, 1)

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        return query - key < self.size
