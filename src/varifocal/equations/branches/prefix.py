"""Global tokens at the start of a document: Beltagy et al., Longformer, arXiv:2004.05150."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from varifocal.equations.branches.base import Branch, FixedBranch, both_by_head, less
from varifocal.equations.branches.head_sizes import HeadSizes, for_heads, require_sizes


@dataclass(frozen=True)
class Prefix(FixedBranch):
    """The first `size` keys of the document, as far as they are not in the query's future."""

    size: HeadSizes
    """Global tokens at the start of each document; or a tuple with a number for each query head (0 for none)."""

    def __post_init__(self) -> None:
        require_sizes("prefix size", self.size, least=0 if isinstance(self.size, tuple) else 1)

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        return (key < for_heads(self.size, key, pairs=True)) & (key <= query)

    def first(self, place: Tensor) -> Tensor:
        sizes = for_heads(self.size, place)
        return (place if isinstance(sizes, int) else place.unsqueeze(-2)).add(1).clamp(min=0).clamp(max=sizes)

    def count(self, place: Tensor, *, beyond: Tensor | int = 0) -> Tensor:
        # The first keys are the farthest: those at a distance of `beyond` or more are the first place + 1 - beyond.
        return torch.minimum(*both_by_head(self.first(place), less(place + 1, beyond)))

    reads_everything = Branch.reads_everything
