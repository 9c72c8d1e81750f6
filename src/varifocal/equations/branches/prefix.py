"""Global tokens at the start of a document: Beltagy et al., Longformer, arXiv:2004.05150."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from varifocal.equations.branches.base import FixedBranch, require_at_least


@dataclass(frozen=True)
class Prefix(FixedBranch):
    """The first `size` keys of the document, as far as they are not in the query's future."""

    size: int
    """Global tokens at the start of each document."""

    def __post_init__(self) -> None:
        require_at_least("prefix size", self.size, 1)

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        return (key < self.size) & (key <= query)
