"""Learned vectors for relative positions: Shaw et al., Self-Attention with Relative Position Representations, 2018."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from varifocal.attention.mechanisms.ablation import Ablation, plain
from varifocal.attention.mechanisms.base import Call, HeadShape, Mechanism, MechanismConfig
from varifocal.attention.mechanisms.variant import Variant
from varifocal.attention.precision import project_heads, wide
from varifocal.equations.branches import Causal
from varifocal.equations.branches.base import require_at_least
from varifocal.equations.equation import Equation
from varifocal.equations.scores import DistanceBias


@dataclass(frozen=True, kw_only=True)
class RelativePositionConfig(MechanismConfig):
    """How far positions are told apart, and what they are added to."""

    clip: int = 16
    """k, the distance from which on all keys share a vector: k + 1 vectors, for the distances 0 .. k."""
    values: bool = False
    """Whether values get vectors too; the paper's own ablation finds those of keys enough."""
    rotary: bool = True
    """Whether queries and keys keep their rotary positions; the paper, which is older, has none."""

    def __post_init__(self) -> None:
        require_at_least("clip", self.clip, 1)


class RelativePosition(Mechanism[RelativePositionConfig]):
    """softmax(q . (k + a_x) / sqrt(D)) (v + b_x) for a key at distance x, with a and b shared by all heads."""

    name = "relative_position"
    config_type = RelativePositionConfig
    variants = (Variant({"clip": 4}), Variant({"clip": 4, "values": True}, "values"))
    ablations = (
        Ablation(name="values", question="vectors for values beside those for keys", options=plain(values=True)),
        Ablation(name="no_rotary", question="the vectors as the only positions", options=plain(rotary=False)),
    )

    def __init__(self, config: RelativePositionConfig | None = None, shape: HeadShape | None = None) -> None:
        super().__init__(config, shape)
        rows, width = self.config.clip + 1, self.shape.head_width
        self.key_vectors = nn.Parameter(torch.empty(rows, width))
        self.value_vectors = nn.Parameter(torch.empty(rows, width)) if self.config.values else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for vectors in (self.key_vectors, self.value_vectors):
            if vectors is not None:
                nn.init.normal_(vectors, std=0.02)

    @property
    def rotates(self) -> bool:
        return self.config.rotary

    def equation(self, call: Call) -> Equation:
        vectors = self.key_vectors / math.sqrt(self.shape.head_width)
        table = project_heads(call.q, vectors.expand(self.shape.heads, -1, -1))  # [B, H, T, k + 1]
        values = None if self.value_vectors is None else wide(self.value_vectors)
        return Equation((Causal(),), score=DistanceBias(table), relative_values=values)

    def start_as_dense(self) -> None:
        for vectors in (self.key_vectors, self.value_vectors):
            if vectors is not None:
                nn.init.zeros_(vectors)

    def rating_flops(self) -> float:
        """The products of every query with the vectors, and of the weights by distance with those of values."""
        rows = self.key_vectors.numel() + (0 if self.value_vectors is None else 2 * self.value_vectors.numel())
        return 2.0 * self.shape.heads * rows

    def words(self) -> str:
        return f"no gate: every key, with a learned vector for each of the last {self.config.clip} distances"
