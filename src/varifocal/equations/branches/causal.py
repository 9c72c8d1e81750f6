"""Every key up to the query's own: Vaswani et al., Attention Is All You Need, 2017."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from varifocal.equations.branches.base import Branch, FixedBranch


@dataclass(frozen=True)
class Causal(FixedBranch):
    """All keys of the document up to the query's own."""

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        return torch.ones_like(query - key, dtype=torch.bool)

    def near(self, place: Tensor) -> Tensor:
        return (place + 1).clamp(min=0)

    count = Branch.count
    reads_everything = Branch.reads_everything
