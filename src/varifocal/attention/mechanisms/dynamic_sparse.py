"""Top-k keys selected by a learned indexer: the papers' Dynamic Sparse row, after DeepSeek-AI, DeepSeek-V3.2, 2025."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from varifocal.attention.backends import prepare
from varifocal.attention.mechanisms.base import Call, HeadShape, Mechanism, MechanismConfig, Overhead, Scale
from varifocal.attention.mechanisms.variant import Variant
from varifocal.attention.memories import KeysAndValues, Memory, RankedBlocks
from varifocal.attention.precision import project_heads, wide
from varifocal.equations.branches import Indexer, TopK, Window, members
from varifocal.equations.branches.base import require_at_least, require_finite
from varifocal.equations.branches.top_k import Select
from varifocal.equations.equation import Equation
from varifocal.equations.problem import Attended, DivergenceProblem


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

    def top_k(self, indexer: Indexer | None) -> TopK:
        """The branch that the indexer selects."""
        return TopK(scale=self.k_scale, minimum=self.k_min, select=self.select, block=self.block, indexer=indexer)


class IndexKeys(KeysAndValues):
    """Keys, values and the indexer's keys."""

    def __init__(self, weight: Tensor, ranked: RankedBlocks | None) -> None:
        super().__init__(ranked)
        self.weight = weight
        """[G, R, D]."""

    def notes(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """The indexer's keys [B, G, T, R]; no gradient goes back through them."""
        return {"index_keys": project_heads(k.detach(), self.weight)}


class DynamicSparse(Mechanism[DynamicSparseConfig]):
    """One softmax over the keys that the indexer rates highest and the query's own.

    The indexer projects each head's queries and keys, positions included, to a small width. It sends no gradient
    back into them, and learns from nothing but the divergence between its distribution and the attention over the
    keys that are read.
    """

    name = "dynamic_sparse"
    config_type = DynamicSparseConfig
    ways = {"exact": {"select": "exact"}, "blocks": {"select": "blocks"}}  # noqa: RUF012
    variants = (Variant({"rank": 3}), Variant({"rank": 3, "select": "blocks", "block": 4}, "blocks"))

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

    def memory(self) -> Memory:
        blocks = self.config.select == "blocks"
        return IndexKeys(self.key_weight, RankedBlocks(self.config.block, of="index_keys") if blocks else None)

    def equation(self, call: Call) -> Equation:
        # Detached: the indexer must not bend the model's queries to be easy to rank.
        queries = project_heads(call.q.detach(), self.query_weight)
        return Equation((self.config.top_k(Indexer(queries, self.note(call, "index_keys"))) | Window(1),))

    def losses(self, call: Call, equation: Equation, attended: Attended) -> dict[str, Tensor]:
        """The divergence that trains the indexer."""
        # The divergence reads the selected keys once more; where nothing trains, that would be wasted.
        if not (self.training and torch.is_grad_enabled() and self.config.divergence):
            return {}
        (top_k,) = (one for one in members(equation.branches[0]) if isinstance(one, TopK))
        selected = attended.selected[0]
        assert top_k.indexer is not None
        assert selected is not None
        problem = DivergenceProblem(
            q=wide(call.q.detach()),
            k=wide(call.k.detach()),
            indexer=top_k.indexer,
            selected=selected,
            top_k=top_k,
            layout=call.layout,
        )
        divergence: Tensor = prepare(call.backend, problem, device=call.q.device.type)()
        return {"indexer": self.config.divergence * divergence}

    @classmethod
    def scaled_options(cls, scale: Scale) -> dict[str, Any]:
        return {"block": scale.block, "rank": max(4, scale.head_width // 4)}

    def words(self) -> str:
        return f"no gate: the keys that an indexer rates highest, about {self.config.k_scale:g} √n of n"

    def training_flops(self, equation: Equation, length: int) -> float:
        """The divergence: the attention's scores and three passes of the indexer's over the selected keys."""
        compared = equation.keys_read(torch.arange(length))
        return self.shape.heads * compared * (2 * self.shape.head_width + 6 * self.config.rank)

    def overhead(self, length: int, bytes_per_number: int) -> Overhead:
        shape, rank = self.shape, self.config.rank
        numbers = (shape.heads + shape.kv_heads) * shape.head_width
        halves = (shape.heads + shape.kv_heads) * rank
        return Overhead(
            traffic=21.0 * numbers + 800 * shape.heads,
            operators=67,
            # The divergence keeps its gradients, and what it was computed from.
            kept=4.0 * (2 * halves + shape.heads * self.config.top_k(None).listed(length)),
        )
