"""The dot product of query and key, plain or with a learned scale for every head."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Score:
    """Rates every pair of a query and a key, from their dot product and whatever else it carries."""

    def rate(self, products: Tensor, *, head_width: int) -> Tensor:
        """Scores [B, H, T, S] from dot products q.k [B, H, T, S]; minus infinity where a pair is not read."""
        raise NotImplementedError

    def prepare(self, dtype: torch.dtype, blind_query: Tensor, unseen_key: Tensor) -> Score:
        """The same score in the given type, with 0 for queries [B, 1, T, 1] and keys [B, 1, S, 1] that do not count."""
        return self


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

    def rate(self, products: Tensor, *, head_width: int) -> Tensor:
        return products * self.factor(head_width)


@dataclass(frozen=True, eq=False)
class HeadScale(Score):
    """scale_h * q.k / sqrt(D), with one learned scale for each head: Henry et al., QK-Norm, arXiv:2010.04245."""

    scale: Tensor
    """[H]."""

    def prepare(self, dtype: torch.dtype, blind_query: Tensor, unseen_key: Tensor) -> HeadScale:
        return replace(self, scale=self.scale.to(dtype))

    def rate(self, products: Tensor, *, head_width: int) -> Tensor:
        return products / math.sqrt(head_width) * self.scale[:, None, None]
