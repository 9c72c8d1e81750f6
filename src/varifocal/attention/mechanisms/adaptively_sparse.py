"""alpha-entmax with a learned alpha for each head: Correia et al., Adaptively Sparse Transformers, arXiv:1909.00015."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from varifocal.attention.mechanisms.ablation import Ablation, plain
from varifocal.attention.mechanisms.base import Call, HeadShape, Mechanism, MechanismConfig
from varifocal.attention.mechanisms.variant import Variant
from varifocal.attention.precision import wide
from varifocal.equations.branches import Causal
from varifocal.equations.equation import Equation
from varifocal.equations.normalizers import LEAST_ALPHA, Entmax


@dataclass(frozen=True, kw_only=True)
class AdaptivelySparseConfig(MechanismConfig):
    """Where alpha starts, and whether it learns."""

    alpha: float = 1.5
    """At the start, between 1.01 (nearly softmax) and 2 (sparsemax)."""
    learns_alpha: bool = True
    """Whether every head learns an alpha of its own."""

    def __post_init__(self) -> None:
        if not LEAST_ALPHA < self.alpha < 2:
            raise ValueError(f"alpha must lie between {LEAST_ALPHA} and 2, got {self.alpha}")


class AdaptivelySparse(Mechanism[AdaptivelySparseConfig]):
    """entmax_alpha(q.k / sqrt(D)) v over all keys of the past: most weights of a sparse head are exactly 0."""

    name = "adaptively_sparse"
    config_type = AdaptivelySparseConfig
    variants = (Variant(), Variant({"alpha": 1.9, "learns_alpha": False}, "fixed"))
    ablations = (
        Ablation(name="fixed_alpha", question="1.5-entmax in every head", options=plain(learns_alpha=False)),
        Ablation(
            name="nearly_softmax",
            question="an alpha of 1.02 in every head: is it the sparsity?",
            options=plain(alpha=1.02, learns_alpha=False),
        ),
    )

    def __init__(self, config: AdaptivelySparseConfig | None = None, shape: HeadShape | None = None) -> None:
        super().__init__(config, shape)
        self.logit = nn.Parameter(torch.empty(self.shape.heads)) if self.config.learns_alpha else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.logit is not None:
            share = (self.config.alpha - LEAST_ALPHA) / (2 - LEAST_ALPHA)
            nn.init.constant_(self.logit, math.log(share / (1 - share)))

    def alpha(self, like: Tensor) -> Tensor:
        """[H]: between 1.01 and 2, with a gradient everywhere."""
        if self.logit is None:
            return torch.full((self.shape.heads,), self.config.alpha, dtype=wide(like).dtype, device=like.device)
        return LEAST_ALPHA + (2 - LEAST_ALPHA) * wide(self.logit).sigmoid()

    def equation(self, call: Call) -> Equation:
        return Equation((Causal(),), normalizer=Entmax(self.alpha(call.q)))

    def start_as_dense(self) -> None:
        """An alpha of 1.012: as near to softmax as the solver goes while alpha can still learn."""
        if self.logit is not None:
            nn.init.constant_(self.logit, -6.0)

    def words(self) -> str:
        return "no gate: every key that scores near the best, the others with a weight of exactly 0"
