"""Attention that fades with distance and keeps what is important: a mechanism made outside of varifocal."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from varifocal import (
    Ablation,
    Call,
    Causal,
    Equation,
    Gate,
    GateConfig,
    HeadShape,
    KeysAndValues,
    Mechanism,
    MechanismConfig,
    Memory,
    Pairs,
    Scale,
    Score,
    Variant,
    Window,
    two_way,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class FadingScore(Score):
    """q.k / sqrt(D) + bias_h[log2 of the distance] + strength_h * importance_j."""

    bias: Tensor
    """[H, N]: one number for each of the distances 0, 1, 2-3, 4-7, ...; the last one for all that are farther."""
    strength: Tensor
    """[H]."""
    importance: Tensor
    """[B, H, S, 1]: of every key, as the memory noted it."""

    def rate(self, products: Tensor, pairs: Pairs) -> Tensor:
        bins = torch.frexp(pairs.distance.clamp(min=0).double()).exponent.long().clamp(max=self.bias.shape[1] - 1)
        faded = self.bias[:, bins[:, 0]].transpose(0, 1)  # [B, H, T, S]
        return products / math.sqrt(pairs.head_width) + faded + self.strength[:, None, None] * self.importance.mT

    def prepare(self, dtype: torch.dtype, blind_query: Tensor, unseen_key: Tensor) -> FadingScore:
        importance = self.importance.to(dtype).masked_fill(unseen_key, 0.0)
        return replace(self, bias=self.bias.to(dtype), strength=self.strength.to(dtype), importance=importance)

    def pair_flops(self) -> float:
        return 3.0

    def is_neutral(self) -> bool:
        return not bool(self.bias.any()) and not bool(self.strength.any())


class ImportantKeys(KeysAndValues):
    """Keys, values and how important each token found itself when it was read."""

    def __init__(self, rater: nn.Linear) -> None:
        super().__init__()
        self.rater = rater

    def notes(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        return {"importance": torch.tanh(self.rater(x)).mT[..., None]}  # [B, H, T, 1]


@dataclass(frozen=True, kw_only=True)
class FadingConfig(MechanismConfig):
    near: int = 128
    """Keys of the near branch, the query's own included."""
    distances: int = 12
    """N of the bias."""
    mix: GateConfig = field(default_factory=GateConfig)


class Fading(Mechanism[FadingConfig]):
    """A gate mixes the last keys with all keys; pairs are rated by distance and importance too."""

    name = "fading"
    config_type = FadingConfig
    variants = (Variant({"near": 5, "distances": 4}), Variant({"near": 40, "mix": {"kind": "static"}}, "wide"))
    ablations = (
        Ablation(name="no_gate", question="does it need a gate?", options=lambda sizes: {"mix": {"kind": "constant"}}),
        Ablation(name="one_bias", question="must the bias see the distance?", options=lambda sizes: {"distances": 1}),
    )

    def __init__(self, config: FadingConfig | None = None, shape: HeadShape | None = None) -> None:
        super().__init__(config, shape)
        heads, width = self.shape.heads, self.shape.model_width
        self.gate = Gate(self.config.mix, model_width=width, heads=heads)
        self.rater = nn.Linear(width, heads)
        self.bias = nn.Parameter(torch.empty(heads, self.config.distances))
        self.strength = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.gate.reset_parameters()
        self.rater.reset_parameters()
        nn.init.ones_(self.strength)
        with torch.no_grad():
            self.bias.copy_(-0.1 * torch.arange(self.config.distances).expand_as(self.bias))

    def memory(self) -> Memory:
        return ImportantKeys(self.rater)

    def equation(self, call: Call) -> Equation:
        gate, losses = self.gate(call.x, counted=call.counted)
        score = FadingScore(self.bias, self.strength, self.note(call, "importance"))
        return Equation((Window(self.config.near), Causal()), two_way(gate), score, losses=losses)

    @classmethod
    def scaled_options(cls, scale: Scale) -> dict[str, Any]:
        return {"near": max(1, scale.window // 2), "distances": scale.context.bit_length()}

    @classmethod
    def dense_options(cls, context: int) -> dict[str, Any]:
        return {"mix": {"start": -12.0}}

    def start_as_dense(self) -> None:
        nn.init.zeros_(self.bias)
        nn.init.zeros_(self.strength)

    def words(self) -> str:
        return f"a gate mixes the last {self.config.near} keys with all of them, fading by distance"
