"""How a query rates a key, pair by pair: FlexAttention's score_mod for each score of the equation.

A number for each head is handed over as one for each head and query. The backward pass adds up what every pair
contributes to it, and so many pairs adding to one address would wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from varifocal.equations.scores import DistanceBias, Dot, HeadScale, PairGate, Score
from varifocal.kernels.flex.pair import Pair


@dataclass(frozen=True, eq=False)
class PairScore:
    """scale * q.k, left as it is."""

    scale: float
    """The factor of the dot product, the same for all pairs."""

    def rate(self, score: Tensor, pair: Pair) -> Tensor:
        """The score of a pair from its scaled dot product."""
        return score


@dataclass(frozen=True, eq=False)
class ScaledByHead(PairScore):
    """A factor for every head."""

    factor: Tensor
    """[H, T]."""

    def rate(self, score: Tensor, pair: Pair) -> Tensor:
        return score * self.factor[pair.head, pair.query]


@dataclass(frozen=True, eq=False)
class BiasedPair(PairScore):
    """A number for the pair's distance is added."""

    table: Tensor
    """[H, N] or [B, H, T, N]."""

    def rate(self, score: Tensor, pair: Pair) -> Tensor:
        distance = (pair.position - pair.key).clamp(0, self.table.shape[-1] - 1)
        if self.table.ndim == 2:
            return score + self.table[pair.head, distance]
        return score + self.table[pair.batch, pair.head, pair.query, distance]


@dataclass(frozen=True, eq=False)
class HiddenUnit:
    """One hidden unit of the pair network; each tensor is looked at once, as FlexAttention's backward asks."""

    queries: Tensor
    """[B, H, T]."""
    keys: Tensor
    """[B, H, S]."""
    output: Tensor
    """[H, T]."""

    def logit(self, pair: Pair) -> Tensor:
        """What the unit adds to the logit of the pair's gate."""
        query = self.queries[pair.batch, pair.head, pair.query]
        key = self.keys[pair.batch, pair.head, pair.key]
        return self.output[pair.head, pair.query] * F.gelu(query + key)


@dataclass(frozen=True, eq=False)
class GatedPair(PairScore):
    """The score under the gate of its pair."""

    gate: PairGate
    """Its form and threshold; the tensors are those below."""
    units: tuple[HiddenUnit, ...]
    bias: Tensor | None
    """[H, T]."""
    factor: Tensor | None
    """[H, T]."""

    def rate(self, score: Tensor, pair: Pair) -> Tensor:
        alpha = score if self.factor is None else score * self.factor[pair.head, pair.query]
        logit = self.units[0].logit(pair)
        for unit in self.units[1:]:
            logit = logit + unit.logit(pair)
        if self.bias is not None:
            logit = logit + self.bias[pair.head, pair.query]
        return self.gate.gated(alpha, logit)


def pair_score(score: Score, *, head_width: int, queries: int) -> PairScore:
    """A prepared score of the equation, for pairs of `queries` queries a head."""

    def for_every_query(numbers: Tensor) -> Tensor:
        return numbers[:, None].expand(-1, queries).contiguous()

    if isinstance(score, Dot):
        return PairScore(score.factor(head_width))
    scale = head_width**-0.5
    if isinstance(score, HeadScale):
        return ScaledByHead(scale, for_every_query(score.scale))
    if isinstance(score, DistanceBias):
        return BiasedPair(scale, score.table)
    assert isinstance(score, PairGate)
    units = tuple(
        HiddenUnit(query.contiguous(), key.contiguous(), for_every_query(output))
        for query, key, output in zip(
            score.queries.unbind(-1), score.keys.unbind(-1), score.output.unbind(-1), strict=True
        )
    )
    bias = None if score.bias is None else for_every_query(score.bias)
    factor = None if score.scale is None else for_every_query(score.scale)
    return GatedPair(scale, score, units, bias, factor)
