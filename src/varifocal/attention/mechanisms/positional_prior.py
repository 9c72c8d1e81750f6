"""A learned prior over distances added to the scores: Bayesian attention (BAM), arXiv:2505.22842."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from varifocal.attention.mechanisms.ablation import Ablation, plain
from varifocal.attention.mechanisms.base import Call, HeadShape, Mechanism, MechanismConfig
from varifocal.attention.mechanisms.variant import Variant
from varifocal.attention.precision import wide
from varifocal.equations.branches import Causal
from varifocal.equations.branches.base import require_finite
from varifocal.equations.equation import Equation
from varifocal.equations.scores import DistanceBias


@dataclass(frozen=True, kw_only=True)
class PositionalPriorConfig(MechanismConfig):
    """The shape of the prior at the start: beta = 1 is ALiBi, 2 a Gaussian around the distance mu."""

    beta: float = 1.0
    """The power of the distance at the start; above 0."""
    learns_beta: bool = True
    """Whether every head learns a power of its own; False keeps the family of the start."""
    learns_center: bool = False
    """Whether every head learns mu, the distance that its prior prefers; frozen at 0 otherwise, as in the paper."""
    epsilon: float = 1e-5
    """Added to the distance before the power: the slope of |x|^beta below beta = 1 is infinite at 0."""
    log_strength: bool = True
    """Whether the strength of a head is e^s, as in the paper; else s itself, which may be 0 or below."""
    rotary: bool = True
    """Whether queries and keys keep their rotary positions; the paper drops them."""

    def __post_init__(self) -> None:
        require_finite("beta", self.beta, least=1e-3)
        require_finite("epsilon", self.epsilon, least=1e-12)


class PositionalPrior(Mechanism[PositionalPriorConfig]):
    """softmax(q.k / sqrt(D) - (|x - mu| + epsilon)^beta e^s) v for a key at distance x, all keys of the past."""

    name = "positional_prior"
    config_type = PositionalPriorConfig
    variants = (Variant(), Variant({"beta": 2.0, "learns_center": True}, "gaussian"))
    ablations = (
        Ablation(name="linear", question="ALiBi: the power fixed at 1", options=plain(learns_beta=False)),
        Ablation(
            name="gaussian", question="a Gaussian: the power fixed at 2", options=plain(beta=2.0, learns_beta=False)
        ),
        Ablation(name="no_rotary", question="the prior as the only positions", options=plain(rotary=False)),
    )

    def __init__(self, config: PositionalPriorConfig | None = None, shape: HeadShape | None = None) -> None:
        super().__init__(config, shape)
        heads = self.shape.heads
        self.strength = nn.Parameter(torch.empty(heads))
        self.power = nn.Parameter(torch.empty(heads)) if self.config.learns_beta else None
        self.center = nn.Parameter(torch.empty(heads)) if self.config.learns_center else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """ALiBi's slopes, which fall from head to head; the power of the config; the center at the query itself."""
        heads = self.shape.heads
        slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
        self.strength.copy_(slopes.log() if self.config.log_strength else slopes)
        if self.power is not None:
            nn.init.constant_(self.power, self.config.beta)
            # softplus(p) = beta: p = log(e^beta - 1).
            self.power.copy_(torch.log(torch.expm1(self.power.double())))
        if self.center is not None:
            nn.init.zeros_(self.center)

    @property
    def rotates(self) -> bool:
        return self.config.rotary

    def table(self, distances: int) -> Tensor:
        """[H, N]: the prior at every distance."""
        strength = wide(self.strength)[:, None]
        if self.config.log_strength:
            strength = strength.exp()
        x = torch.arange(distances, dtype=strength.dtype, device=strength.device)
        if self.center is not None:
            x = x - wide(self.center)[:, None]
        power: Tensor | float = self.config.beta
        if self.power is not None:
            # Above 0 whatever is learned: a negative power would be unbounded at distance 0.
            power = F.softplus(wide(self.power))[:, None]
        return -strength * (x.abs() + self.config.epsilon) ** power

    def equation(self, call: Call) -> Equation:
        return Equation((Causal(),), score=DistanceBias(self.table(max(call.k.shape[2], 1))))

    @classmethod
    def dense_options(cls, context: int) -> dict[str, Any]:
        """A strength that can be 0 and still learn."""
        return {"log_strength": False}

    @torch.no_grad()
    def start_as_dense(self) -> None:
        """Strength 0; e^s is never 0, but e^-100 times any distance is nothing beside a score."""
        nn.init.constant_(self.strength, -100.0 if self.config.log_strength else 0.0)

    def words(self) -> str:
        return "no gate: every key, less the farther it is, by a power of the distance that each head learns"
