"""Polynomial attention that factorizes: Gerami et al., FAST, arXiv:2402.07901."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from varifocal.attention.mechanisms.ablation import Ablation, plain
from varifocal.attention.mechanisms.base import Call, Mechanism, MechanismConfig
from varifocal.attention.mechanisms.variant import Variant
from varifocal.attention.precision import wide
from varifocal.equations.branches import Causal
from varifocal.equations.equation import Equation
from varifocal.equations.normalizers import Polynomial
from varifocal.equations.scores import OwnFeatures


@dataclass(frozen=True, kw_only=True)
class FastmaxConfig(MechanismConfig):
    """The order of the polynomial that stands for the exponential."""

    order: int = 1
    """1: 1 + s; 2: 1 + s + s^2 / 2."""

    def __post_init__(self) -> None:
        if self.order not in (1, 2):
            raise ValueError(f"order must be 1 or 2, got {self.order}")


class Fastmax(Mechanism[FastmaxConfig]):
    """sum_j f(s_ij) v_j / sum_j f(s_ij) over all keys of the past, in work that is linear in the text."""

    name = "fastmax"
    config_type = FastmaxConfig
    ways = {"order 1": {"order": 1}, "order 2": {"order": 2}}  # noqa: RUF012
    variants = (Variant(), Variant({"order": 2}, "order 2"))
    ablations = (Ablation(name="order_2", question="one more term of the exponential", options=plain(order=2)),)

    def equation(self, call: Call) -> Equation:
        width = self.shape.head_width
        # Standardized vectors have length sqrt(D). With s a cosine, 1 + s is never negative; 1 + s + s^2 / 2 never is.
        scale = width**-0.5 if self.config.order == 1 else width**-0.25
        score = OwnFeatures(standardized(call.q) * scale, standardized(call.k) * scale)
        return Equation((Causal(),), score=score, normalizer=Polynomial(self.config.order))

    def words(self) -> str:
        return "no gate: every key, with a polynomial in place of the exponential"


def standardized(x: Tensor) -> Tensor:
    """[..., D] with mean 0 and deviation 1 of each token, in float32 or wider; NaN, which only padding holds, as 0."""
    x = wide(x)
    return F.layer_norm(x.masked_fill(x.isnan(), 0.0), x.shape[-1:])
