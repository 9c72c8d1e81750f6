"""Top-k keys chosen by a learned indexer: the papers' Dynamic Sparse row, after DeepSeek-AI, DeepSeek-V3.2, 2025."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from varifocal.attention.mechanisms.base import (
    Call,
    HeadShape,
    Mechanism,
    MechanismConfig,
    MechanismOutput,
    RankedBlocks,
)
from varifocal.attention.mechanisms.indexer_loss import indexer_divergence
from varifocal.attention.precision import project_heads
from varifocal.equations.branches import Indexer, TopK, Window
from varifocal.equations.branches.base import require_at_least, require_finite
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
        require_finite("divergence", self.divergence, least=0)
        self.top_k(None)

    def top_k(self, indexer: Indexer | None, pooled: Tensor | None = None) -> TopK:
        """The branch that the indexer chooses."""
        return TopK(
            scale=self.k_scale,
            minimum=self.k_min,
            select=self.select,
            block=self.block,
            indexer=indexer,
            pooled=pooled,
        )


class DynamicSparse(Mechanism[DynamicSparseConfig]):
    """One softmax over the keys that the indexer rates highest and the query's own.

    The indexer projects each head's queries and keys, positions included, to a small width. It sends no gradient
    back into them, and learns from nothing but the divergence between its distribution and the attention over the
    keys that are read.
    """

    name = "dynamic_sparse"
    config_type = DynamicSparseConfig

    def __init__(self, config: DynamicSparseConfig | None = None, shape: HeadShape | None = None) -> None:
        super().__init__(config, shape)
        rank, width = self.config.rank, self.shape.head_width
        self.query_weight = nn.Parameter(torch.empty(self.shape.heads, rank, width))
        self.key_weight = nn.Parameter(torch.empty(self.shape.kv_heads, rank, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """One random projection for a key head and its query heads: index scores start as guesses of q.k / sqrt(D)."""
        nn.init.normal_(self.key_weight, std=self.config.rank**-0.5 * self.shape.head_width**-0.25)
        groups = self.shape.heads // self.shape.kv_heads
        with torch.no_grad():
            self.query_weight.copy_(self.key_weight.repeat_interleave(groups, dim=0))

    def remember(self, x: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """The indexer's keys [B, G, T, R]."""
        return project_heads(k.detach(), self.key_weight)

    def ranked_blocks(self, k: Tensor, memory: Tensor | None) -> RankedBlocks | None:
        return (
            RankedBlocks(memory, self.config.block) if self.config.select == "blocks" and memory is not None else None
        )

    def focus(self, call: Call) -> MechanismOutput:
        indexer = Indexer(project_heads(call.q.detach(), self.query_weight), self.needed_memory(call))
        top_k = self.config.top_k(indexer, call.pooled)
        attended = call.attend(top_k | Window(1))
        selected = attended.selected[0]
        assert selected is not None
        losses = {}
        if self.training and torch.is_grad_enabled() and self.config.divergence:
            divergence = indexer_divergence(
                call.q, call.k, indexer, selected, top_k, call.layout(), backend=call.backend
            )
            losses["indexer"] = self.config.divergence * divergence
        return MechanismOutput(attended.output, losses, {"selected": selected})
