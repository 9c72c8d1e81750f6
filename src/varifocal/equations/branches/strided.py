"""Every stride-th key: Child et al., Generating Long Sequences with Sparse Transformers, arXiv:1904.10509."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from varifocal.equations.branches.base import Branch, FixedBranch, less, require_at_least


@dataclass(frozen=True)
class Strided(FixedBranch):
    """The query's own key and every `stride`-th key before it."""

    stride: int
    """Distance between two keys that are read."""

    def __post_init__(self) -> None:
        require_at_least("stride", self.stride, 1)

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        return (query - key) % self.stride == 0

    def near(self, place: Tensor) -> Tensor:
        return (place + 1).clamp(min=0, max=1 if self.stride > 1 else None)

    def count(self, place: Tensor, *, beyond: Tensor | int = 0) -> Tensor:
        skipped = (torch.as_tensor(beyond, device=place.device) + self.stride - 1) // self.stride
        return less(torch.div(place, self.stride, rounding_mode="floor") + 1, skipped)

    reads_everything = Branch.reads_everything
