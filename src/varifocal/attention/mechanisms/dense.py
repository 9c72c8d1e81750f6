"""Every key up to the query's own in one softmax: the papers' Qwen baseline (Vaswani et al., 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from varifocal.attention.mechanisms.base import Call, Mechanism, MechanismConfig, MechanismOutput
from varifocal.equations.branches import Causal


@dataclass(frozen=True, kw_only=True)
class DenseConfig(MechanismConfig):
    """Dense attention has no options."""


class Dense(Mechanism[DenseConfig]):
    """softmax(q.k / sqrt(D)) v over all keys of the past."""

    name = "dense"
    config_type = DenseConfig

    def focus(self, call: Call) -> MechanismOutput:
        return MechanismOutput(call.attend(Causal()).output)
