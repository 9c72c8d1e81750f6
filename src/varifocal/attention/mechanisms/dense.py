"""Every key up to the query's own in one softmax: the papers' Qwen baseline (Vaswani et al., 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from varifocal.attention.mechanisms.base import Call, Mechanism, MechanismConfig, Step
from varifocal.attention.mechanisms.variant import Variant
from varifocal.equations.branches import Causal
from varifocal.equations.equation import Equation


@dataclass(frozen=True, kw_only=True)
class DenseConfig(MechanismConfig):
    """Dense attention has no options."""


class Dense(Mechanism[DenseConfig]):
    """softmax(q.k / sqrt(D)) v over all keys of the past."""

    name = "dense"
    config_type = DenseConfig
    variants = (Variant(),)
    bench_reference = ("",)

    def equation(self, call: Call) -> Equation:
        return Equation((Causal(),))

    def step(self) -> Step | None:
        return Step((Causal(),))

    def words(self) -> str:
        return "no gate: every key"
