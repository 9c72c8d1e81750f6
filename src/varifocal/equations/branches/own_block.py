"""The keys of the query's own block, up to the query: a part of branches that select or summarise blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from varifocal.equations.blocks import same_block
from varifocal.equations.branches.base import Branch, FixedBranch, less, require_at_least


@dataclass(frozen=True)
class OwnBlock(FixedBranch):
    """The keys of the block of `length` keys in which the query stands."""

    length: int
    """Keys in a block; blocks begin anew with every document."""

    def __post_init__(self) -> None:
        require_at_least("block", self.length, 1)

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        return same_block(query, key, self.length)

    def near(self, place: Tensor) -> Tensor:
        return torch.where(place < 0, 0, place % self.length + 1)

    def count(self, place: Tensor, *, beyond: Tensor | int = 0) -> Tensor:
        return less(self.near(place), beyond)

    def farthest(self) -> int:
        return self.length

    reads_everything = Branch.reads_everything
