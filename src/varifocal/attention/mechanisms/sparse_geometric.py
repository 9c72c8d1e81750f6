"""Pairwise sparsity gates with learned scaling: Adaptive Sparse-Geometric Attention (ASGA)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from varifocal.attention.mechanisms.ablation import Ablation, plain
from varifocal.attention.mechanisms.base import Call, HeadShape, Mechanism, MechanismConfig, Overhead, Scale
from varifocal.attention.mechanisms.variant import Variant
from varifocal.attention.memories import KeysAndValues, Memory
from varifocal.attention.precision import project_heads, wide
from varifocal.equations.branches import Branch, Causal, Strided, Window
from varifocal.equations.branches.base import require_at_least
from varifocal.equations.equation import Equation
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


class PairHalves(KeysAndValues):
    """Keys, values and the keys' half of the pair network's hidden layer."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight
        """[H, P, D]."""

    def notes(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """[B, H, T, P]: W1's second half times LN(k)."""
        return {"pair_keys": half_hidden(k.repeat_interleave(q.shape[1] // k.shape[1], dim=1), self.weight)}


class SparseGeometric(Mechanism[SparseGeometricConfig]):
    """softmax(softplus(gamma) * q.k / sqrt(D) * sigmoid(W2 GELU(W1 [LN q ; LN k]))) v."""

    name = "sparse_geometric"
    config_type = SparseGeometricConfig
    variants = (
        Variant({"hidden": 3}),
        Variant({"hidden": 3, "form": "log", "bias": 1.0}, "log"),
        Variant({"hidden": 3, "form": "threshold", "threshold": 0.4}, "threshold"),
    )
    ablations = (
        Ablation(name="no_scaling", question="the paper's: without the learned scale", options=plain(scaling=False)),
        Ablation(
            name="fixed_sparsity",
            question="the paper's: a fixed pattern in place of the pair network",
            options=plain(sparsity="fixed"),
        ),
        Ablation(
            name="both_off",
            question="the paper's: without both; it must equal dense",
            options=plain(sparsity="none", scaling=False),
        ),
        Ablation(
            name="additive", question="a closed gate that removes a pair: alpha + log s", options=plain(form="log")
        ),
        Ablation(
            name="threshold",
            question="pairs whose gate is below the threshold are not read",
            options=plain(form="threshold"),
        ),
    )

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
            # softplus(log(e - 1)) = 1.
            nn.init.constant_(self.gamma, math.log(math.e - 1))

    def memory(self) -> Memory:
        return KeysAndValues() if self.key_weight is None else PairHalves(self.key_weight)

    def score(self, call: Call) -> Score:
        """The scaled and gated score of the config."""
        scale = None if self.gamma is None else F.softplus(wide(self.gamma))
        if self.query_weight is None or self.output_weight is None:
            return Dot() if scale is None else HeadScale(scale)
        return PairGate(
            queries=half_hidden(call.q, self.query_weight),
            keys=self.note(call, "pair_keys"),
            output=self.output_weight,
            bias=self.bias,
            scale=scale,
            form=self.config.form,
            threshold=self.config.threshold,
        )

    def equation(self, call: Call) -> Equation:
        branch: Branch = Causal()
        if self.config.sparsity == "fixed":
            branch = Window(self.config.stride) | Strided(self.config.stride)
        return Equation((branch,), score=self.score(call))

    @classmethod
    def scaled_options(cls, scale: Scale) -> dict[str, Any]:
        return {"stride": scale.root}

    @torch.no_grad()
    def start_as_dense(self) -> None:
        """With a zero last layer the gate of every pair is the same s.

        In the paper's product the head's scale takes it back, softplus(gamma) = 1 / s; beside the score, as log s, it
        moves all scores alike and softmax does not see it.
        """
        scale = 1.0
        if self.output_weight is not None:
            nn.init.zeros_(self.output_weight)
            scale = 1 + math.exp(-(self.config.bias or 0.0)) if self.config.form == "product" else 1.0
        if self.gamma is not None:
            nn.init.constant_(self.gamma, math.log(math.expm1(scale)))

    def words(self) -> str:
        if self.config.sparsity == "learned":
            return "no gate on branches: every key, each pair of query and key with a gate of its own"
        if self.config.sparsity == "fixed":
            return f"no gate: the last {self.config.stride} keys and before them every {self.config.stride}th"
        return "no gate: every key"

    def rating_flops(self) -> float:
        """The two halves of the hidden layer; the output layer belongs to the pairs."""
        return 2.0 * sum(weight.numel() for weight in (self.query_weight, self.key_weight) if weight is not None)

    def overhead(self, length: int, bytes_per_number: int) -> Overhead:
        shape = self.shape
        queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        kept = 4.0 * (4 * queries + keys) + shape.heads * (8.0 * self.config.hidden + 16)
        return Overhead(traffic=157.0 * queries, operators=31, kept=kept if self.config.sparsity == "learned" else 0.0)


def half_hidden(heads: Tensor, weight: Tensor) -> Tensor:
    """weight_h . LN(heads) [B, H, T, P] from heads [B, H, T, D] and weight [H, P, D].

    The norm has no scale or shift of its own: the weight after it would absorb a scale, and the paper's network has
    no hidden bias.
    """
    heads = wide(heads)
    return project_heads(F.layer_norm(heads.masked_fill(heads.isnan(), 0.0), heads.shape[-1:]), weight)
