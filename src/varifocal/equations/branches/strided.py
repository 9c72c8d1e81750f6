"""Every stride-th key: Child et al., Generating Long Sequences with Sparse Transformers, arXiv:1904.10509."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from varifocal.equations.branches.base import FixedBranch, require_at_least


@dataclass(frozen=True)
class Strided(FixedBranch):
    """The query's own key and every `stride`-th key before it."""

    stride: int
    """Distance between two keys that are read."""

    def __post_init__(self) -> None:
        require_at_least("stride", self.stride, 1)

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        return (query - key) % self.stride == 0
