"""The dot product of query and key, plain or with a learned scale for every head."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from varifocal.equations.scores.base import Pairs, Score


@dataclass(frozen=True)
class Dot(Score):
    """scale * q.k: Vaswani et al., Attention Is All You Need, 2017."""

    scale: float | None = None
    """The factor of the dot product; None for 1 / sqrt(D)."""

    def __post_init__(self) -> None:
        if self.scale is not None and not math.isfinite(self.scale):
            raise ValueError(f"score scale must be a finite number, got {self.scale}")

    def factor(self, head_width: int) -> float:
        """The factor in force for heads of width D."""
        return 1.0 / math.sqrt(head_width) if self.scale is None else self.scale

    def rate(self, products: Tensor, pairs: Pairs) -> Tensor:
        return self.rate_blocks(products, head_width=pairs.head_width)

    def rate_blocks(self, products: Tensor, *, head_width: int) -> Tensor:
        return products * self.factor(head_width)

    def is_neutral(self) -> bool:
        return self.scale is None


@dataclass(frozen=True, eq=False)
class HeadScale(Score):
    """scale_h * q.k / sqrt(D), with one learned scale for each head: Henry et al., QK-Norm, arXiv:2010.04245."""

    scale: Tensor
    """[H]."""

    def prepare(self, dtype: torch.dtype, blind_query: Tensor, unseen_key: Tensor) -> HeadScale:
        return replace(self, scale=self.scale.to(dtype))

    def rate(self, products: Tensor, pairs: Pairs) -> Tensor:
        return self.rate_blocks(products, head_width=pairs.head_width)

    def rate_blocks(self, products: Tensor, *, head_width: int) -> Tensor:
        return products / math.sqrt(head_width) * self.scale[:, None, None]

    def is_neutral(self) -> bool:
        return is_one(self.scale)


def is_one(scale: Tensor) -> bool:
    """Whether every factor is 1, to a few roundings of a float32."""
    return bool(torch.allclose(scale.detach().float(), torch.ones(()), rtol=1e-5, atol=0.0))
