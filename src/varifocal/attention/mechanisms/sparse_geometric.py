"""Pairwise sparsity gates with learned scaling: Adaptive Sparse-Geometric Attention (ASGA)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from varifocal.attention.mechanisms.base import Call, HeadShape, Mechanism, MechanismConfig, MechanismOutput
from varifocal.attention.precision import project_heads, wide
from varifocal.equations.branches import Branch, Causal, Strided, Window
from varifocal.equations.branches.base import require_at_least
from varifocal.equations.scores import Dot, HeadScale, PairGate, Score
from varifocal.equations.scores.pair_gate import PairForm


@dataclass(frozen=True, kw_only=True)
class SparseGeometricConfig(MechanismConfig):
    """The paper's pair network and scale; with sparsity="none" and scaling=False it is dense attention."""

    hidden: int = 16
    """P, hidden units of each head's pair network."""
    sparsity: Literal["learned", "fixed", "none"] = "learned"
    """"learned": the pair network; "fixed": the strided pattern of Sparse Transformers instead; "none": all pairs."""
    scaling: bool = True
    """The learned factor softplus(gamma_h) of each head, 1 at the start."""
    form: PairForm = "product"
    """"product" is the paper's alpha * s; "log" is alpha + log s; "threshold" is "log" without pairs below it."""
    threshold: float = 0.1
    """The least gate that is read, for form="threshold"."""
    bias: float | None = None
    """The start of a learned bias of the gate's logit; None for the paper's network, which has none."""
    stride: int = 128
    """The stride of sparsity="fixed"."""

    def __post_init__(self) -> None:
        require_at_least("hidden", self.hidden, 1)
        require_at_least("stride", self.stride, 1)
        if self.sparsity not in ("learned", "fixed", "none"):
            raise ValueError(f"sparsity must be 'learned', 'fixed' or 'none', got {self.sparsity!r}")
        if self.form not in ("product", "log", "threshold"):
            raise ValueError(f"form must be 'product', 'log' or 'threshold', got {self.form!r}")
        if not 0 < self.threshold < 1:
            raise ValueError(f"threshold must lie between 0 and 1, got {self.threshold}")


class SparseGeometric(Mechanism[SparseGeometricConfig]):
    """softmax(softplus(gamma) * q.k / sqrt(D) * sigmoid(W2 GELU(W1 [LN q ; LN k]))) v."""

    name = "sparse_geometric"
    config_type = SparseGeometricConfig

    def __init__(self, config: SparseGeometricConfig | None = None, shape: HeadShape | None = None) -> None:
        super().__init__(config, shape)
        heads, width, hidden = self.shape.heads, self.shape.head_width, self.config.hidden
        learned = self.config.sparsity == "learned"
        self.query_weight = nn.Parameter(torch.empty(heads, hidden, width)) if learned else None
        self.key_weight = nn.Parameter(torch.empty(heads, hidden, width)) if learned else None
        self.output_weight = nn.Parameter(torch.empty(heads, hidden)) if learned else None
        self.bias = nn.Parameter(torch.empty(heads)) if learned and self.config.bias is not None else None
        self.gamma = nn.Parameter(torch.empty(heads)) if self.config.scaling else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """W1 scaled by its fan-in, W2 small (gates near 1/2), softplus(gamma) = 1."""
        for weight in (self.query_weight, self.key_weight):
            if weight is not None:
                nn.init.normal_(weight, std=(2 * self.shape.head_width) ** -0.5)
        if self.output_weight is not None:
            nn.init.normal_(self.output_weight, std=0.02)
        if self.bias is not None and self.config.bias is not None:
            nn.init.constant_(self.bias, self.config.bias)
        if self.gamma is not None:
            nn.init.constant_(self.gamma, math.log(math.e - 1))

    def remember(self, x: Tensor, q: Tensor, k: Tensor) -> Tensor | None:
        """The key's half of the hidden layer [B, H, T, P], W1's second half times LN(k)."""
        if self.key_weight is None:
            return None
        groups = self.shape.heads // self.shape.kv_heads
        return half_hidden(k.repeat_interleave(groups, dim=1), self.key_weight)

    def score(self, call: Call) -> Score:
        """The scaled and gated score of the config."""
        scale = None if self.gamma is None else F.softplus(wide(self.gamma))
        if self.query_weight is None or self.output_weight is None:
            return Dot() if scale is None else HeadScale(scale)
        return PairGate(
            queries=half_hidden(call.q, self.query_weight),
            keys=self.needed_memory(call),
            output=self.output_weight,
            bias=self.bias,
            scale=scale,
            form=self.config.form,
            threshold=self.config.threshold,
        )

    def focus(self, call: Call) -> MechanismOutput:
        branch: Branch = Causal()
        if self.config.sparsity == "fixed":
            branch = Window(self.config.stride) | Strided(self.config.stride)
        return MechanismOutput(call.attend(branch, score=self.score(call)).output)


def half_hidden(heads: Tensor, weight: Tensor) -> Tensor:
    """weight_h . LN(heads) [B, H, T, P] from heads [B, H, T, D] and weight [H, P, D].

    The norm has no scale or shift of its own: the weight behind it would absorb a scale, and the paper's network has
    no hidden bias.
    """
    heads = wide(heads)
    return project_heads(F.layer_norm(heads.masked_fill(heads.isnan(), 0.0), heads.shape[-1:]), weight)
