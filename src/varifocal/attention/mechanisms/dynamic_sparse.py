"""Top-k keys chosen by a learned indexer: the papers' Dynamic Sparse row, after DeepSeek-AI, DeepSeek-V3.2, 2025."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from varifocal.attention.mechanisms.base import Call, HeadShape, Mechanism, MechanismConfig, MechanismOutput
from varifocal.attention.mechanisms.indexer_loss import indexer_divergence
from varifocal.attention.precision import wide_linear
from varifocal.equations.branches import Indexer, TopK, Window
from varifocal.equations.branches.base import require_at_least
from varifocal.equations.branches.top_k import Select


@dataclass(frozen=True, kw_only=True)
class DynamicSparseConfig(MechanismConfig):
    """k = max(k_min, ceil(k_scale * sqrt(i + 1))) keys, ranked by queries and keys of a small width."""

    k_scale: float = 1.0
    k_min: int = 1
    select: Select = "exact"
    block: int = 64
    rank: int = 32
    """R, the width of the indexer's queries and keys."""
    divergence: float = 1.0
    """Coefficient of the loss that trains the indexer."""

    def __post_init__(self) -> None:
        require_at_least("rank", self.rank, 1)
        require_at_least("divergence", self.divergence, 0)
        self.top_k(None)

    def top_k(self, indexer: Indexer | None) -> TopK:
        """The branch that the indexer chooses."""
        return TopK(scale=self.k_scale, minimum=self.k_min, select=self.select, block=self.block, indexer=indexer)


class DynamicSparse(Mechanism[DynamicSparseConfig]):
    """One softmax over the keys that the indexer rates highest and the query's own.

    The indexer reads the layer's input without sending gradients back into it, and learns from nothing but the
    divergence between its distribution and the attention over the chosen keys.
    """

    name = "dynamic_sparse"
    config_type = DynamicSparseConfig

    def __init__(self, config: DynamicSparseConfig | None = None, shape: HeadShape | None = None) -> None:
        super().__init__(config, shape)
        rank = self.config.rank
        self.index_query = nn.Linear(self.shape.model_width, self.shape.heads * rank, bias=False)
        self.index_key = nn.Linear(self.shape.model_width, self.shape.kv_heads * rank, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Scaled by fan-in, and rank^-1/4 on each side, so that index scores start with variance 1."""
        for layer in (self.index_query, self.index_key):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5 * self.config.rank**-0.25)

    def index_heads(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """[B, heads of the layer, T, R]."""
        return wide_linear(layer, x.detach()).view(*x.shape[:2], -1, self.config.rank).transpose(1, 2)

    def remember(self, x: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """The indexer's keys [B, G, T, R]."""
        return self.index_heads(self.index_key, x)

    def focus(self, call: Call) -> MechanismOutput:
        indexer = Indexer(self.index_heads(self.index_query, call.x), self.needed_memory(call))
        top_k = self.config.top_k(indexer)
        attended = call.attend(top_k | Window(1))
        selected = attended.selected[0]
        assert selected is not None
        losses = {}
        if self.training and torch.is_grad_enabled() and self.config.divergence:
            divergence = indexer_divergence(call.q, call.k, indexer, selected, top_k, call.layout())
            losses["indexer"] = self.config.divergence * divergence
        return MechanismOutput(attended.output, losses, {"selected": selected})
