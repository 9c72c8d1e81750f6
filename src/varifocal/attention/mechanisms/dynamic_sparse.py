"""Top-k keys by a learned indexer: DeepSeek-AI, DeepSeek-V3.2, 2025; literally: Liu et al., arXiv:2110.11299."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from varifocal.attention.backends import prepare
from varifocal.attention.mechanisms.ablation import Ablation, plain
from varifocal.attention.mechanisms.base import Call, HeadShape, Mechanism, MechanismConfig, Overhead, Scale
from varifocal.attention.mechanisms.variant import Variant
from varifocal.attention.memories import KeysAndValues, Memory, RankedBlocks
from varifocal.attention.precision import project_heads, wide
from varifocal.equations.branches import Indexer, TopK, Window, members
from varifocal.equations.branches.base import require_at_least, require_finite
from varifocal.equations.branches.top_k import Select
from varifocal.equations.equation import Equation
from varifocal.equations.problem import Attended, DivergenceProblem
from varifocal.equations.squared_error import CHUNK, mean_squared_product

Prediction = Literal["heads", "input"]


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
    prediction: Prediction = "heads"
    """"heads": projections of queries and keys, trained by the divergence from the attention over the selected keys;
    "input": scores predicted from a random projection of the layer's input, trained by the squared error of all pairs
    (Liu et al., arXiv:2110.11299)."""

    def __post_init__(self) -> None:
        require_at_least("rank", self.rank, 1)
        require_finite("divergence", self.divergence, least=0)
        if self.prediction not in ("heads", "input"):
            raise ValueError(f"prediction must be 'heads' or 'input', got {self.prediction!r}")
        self.top_k(None)

    def top_k(self, indexer: Indexer | None) -> TopK:
        """The branch that the indexer selects."""
        return TopK(scale=self.k_scale, minimum=self.k_min, select=self.select, block=self.block, indexer=indexer)


class IndexKeys(KeysAndValues):
    """Keys, values and the indexer's keys."""

    def __init__(self, weight: Tensor, ranked: RankedBlocks | None, projection: Tensor | None = None) -> None:
        super().__init__(ranked)
        self.weight = weight
        """[G, R, D], or [G, R, R] after a projection."""
        self.projection = projection
        """[R, C], of the layer's input; None for indexers of keys."""

    def notes(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """The indexer's keys [B, G, T, R]; no gradient goes back through them."""
        if self.projection is None:
            return {"index_keys": project_heads(k.detach(), self.weight)}
        keys = project_heads(projected_input(x, self.projection, len(self.weight)), self.weight)
        # In a first layer a token that comes again has the same input. On a coarse grid its key is the same too, and
        # the lower index wins; otherwise the last bit would decide, which differs between a prompt and a cached step.
        return {"index_keys": keys.bfloat16().to(keys.dtype)}

    def __deepcopy__(self, memo: dict[int, Any]) -> IndexKeys:
        if self.projection is not None:
            memo[id(self.projection)] = self.projection
        return super().__deepcopy__(memo)


class DynamicSparse(Mechanism[DynamicSparseConfig]):
    """One softmax over the keys that the indexer rates highest and the query's own.

    The indexer projects each head's queries and keys, positions included, to a small width. It sends no gradient
    back into them, and learns from nothing but the divergence between its distribution and the attention over the
    keys that are read. With prediction="input" it reads the layer's input through a random projection that is never
    trained, and learns to meet the scores of all pairs.
    """

    name = "dynamic_sparse"
    config_type = DynamicSparseConfig
    ways = {"exact": {"select": "exact"}, "blocks": {"select": "blocks"}}  # noqa: RUF012
    variants = (
        Variant({"rank": 3}),
        Variant({"rank": 3, "select": "blocks", "block": 4}, "blocks"),
        Variant({"rank": 3, "prediction": "input"}, "input"),
    )
    ablations = (
        Ablation(
            name="from_input",
            question="can scores be predicted from the layer's input, by squared error?",
            options=plain(prediction="input"),
        ),
    )
    projection: Tensor | None

    def __init__(self, config: DynamicSparseConfig | None = None, shape: HeadShape | None = None) -> None:
        super().__init__(config, shape)
        rank, literal = self.config.rank, self.config.prediction == "input"
        width = rank if literal else self.shape.head_width
        self.register_buffer("projection", torch.empty(rank, self.shape.model_width) if literal else None)
        self.query_weight = nn.Parameter(torch.empty(self.shape.heads, rank, width))
        self.key_weight = nn.Parameter(torch.empty(self.shape.kv_heads, rank, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """One random projection for a key head and its query heads: index scores start as guesses of q.k / sqrt(D)."""
        rank = self.config.rank
        if self.projection is None:
            nn.init.normal_(self.key_weight, std=rank**-0.5 * self.shape.head_width**-0.25)
        else:
            # sqrt(3 / R) {-1, 0, 1} with 1/6, 2/3, 1/6: keeps lengths on the average (Achlioptas, 2003).
            signs = torch.randint(0, 6, self.projection.shape)
            with torch.no_grad():
                self.projection.copy_(((signs == 0).float() - (signs == 1).float()) * (3 / rank) ** 0.5)
            nn.init.normal_(self.key_weight, std=rank**-0.25 * self.shape.model_width**-0.5)
        groups = self.shape.heads // self.shape.kv_heads
        with torch.no_grad():
            self.query_weight.copy_(self.key_weight.repeat_interleave(groups, dim=0))

    def memory(self) -> Memory:
        blocks = self.config.select == "blocks"
        ranked = RankedBlocks(self.config.block, of="index_keys") if blocks else None
        return IndexKeys(self.key_weight, ranked, self.projection)

    def equation(self, call: Call) -> Equation:
        # Detached: the indexer must not bend the model's queries to be easy to rank.
        read = call.q.detach()
        if self.projection is not None:
            read = projected_input(call.x, self.projection, self.shape.heads)
        queries = project_heads(read, self.query_weight)
        return Equation((self.config.top_k(Indexer(queries, self.note(call, "index_keys"))) | Window(1),))

    def losses(self, call: Call, equation: Equation, attended: Attended) -> dict[str, Tensor]:
        """The divergence, or the squared error, that trains the indexer."""
        # The divergence reads the selected keys once more; where nothing trains, that would be wasted.
        if not (self.training and torch.is_grad_enabled() and self.config.divergence):
            return {}
        (top_k,) = (one for one in members(equation.branches[0]) if isinstance(one, TopK))
        selected = attended.selected[0]
        assert top_k.indexer is not None
        if self.projection is not None:
            error = self.squared_error(call, top_k.indexer)
            return {"indexer": self.config.divergence * error}
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

    def squared_error(self, call: Call, indexer: Indexer) -> Tensor:
        """The mean over heads and all pairs of (q.k / sqrt(D) - the prediction)^2."""
        q, k = wide(call.q.detach()) * self.shape.head_width**-0.5, wide(call.k.detach())
        return mean_squared_product(
            torch.cat((q, -indexer.queries), dim=-1), torch.cat((k, indexer.keys), dim=-1), call.layout
        )

    @classmethod
    def scaled_options(cls, scale: Scale) -> dict[str, Any]:
        return {"block": scale.block, "rank": max(4, scale.head_width // 4)}

    def words(self) -> str:
        by = "an indexer" if self.projection is None else "an indexer of the layer's input"
        return f"no gate: the keys that {by} rates highest, about {self.config.k_scale:g} √n of n"

    def rating_flops(self) -> float:
        """Two for each weight, those of the random projection included."""
        return super().rating_flops() + (0 if self.projection is None else 2.0 * self.projection.numel())

    def training_flops(self, equation: Equation, length: int) -> float:
        """The squared error: a matrix of all earlier pairs' products, and the pairs of a chunk, with their gradients.

        The divergence: the attention's scores and three passes of the indexer's over the selected keys."""
        if self.projection is not None:
            width = self.shape.head_width + self.config.rank
            return 3.0 * self.shape.heads * (2 * width**2 + width * CHUNK)
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


def projected_input(x: Tensor, projection: Tensor, heads: int) -> Tensor:
    """[B, heads, T, R]: the layer's input x [B, T, C] through a projection [R, C], for every head, detached."""
    x = wide(x.detach())
    with torch.autocast(x.device.type, enabled=False):
        return (x @ projection.to(x.dtype).mT)[:, None].expand(-1, heads, -1, -1)
