"""Each head balances a window against the whole context: Dynamic Sparse Attention with Learned Head Gating."""

from __future__ import annotations

from dataclasses import dataclass, field

from varifocal.attention.gates import Gate, GateConfig
from varifocal.attention.mechanisms.base import (
    Call,
    HeadShape,
    Mechanism,
    MechanismConfig,
    MechanismOutput,
    two_way,
)
from varifocal.equations.branches import Causal, Window
from varifocal.equations.branches.base import require_at_least


@dataclass(frozen=True, kw_only=True)
class HeadGatedConfig(MechanismConfig):
    """The paper's 256-token window, and its gate g = sigmoid(W x + b)."""

    window: int = 256
    """Keys of the local branch, the query's own included."""
    gate: GateConfig = field(default_factory=lambda: GateConfig(kind="linear"))

    def __post_init__(self) -> None:
        require_at_least("window", self.window, 1)


class HeadGated(Mechanism[HeadGatedConfig]):
    """g * window attention + (1 - g) * dense attention, with g from the token's own input, one for each head."""

    name = "head_gated"
    config_type = HeadGatedConfig

    def __init__(self, config: HeadGatedConfig | None = None, shape: HeadShape | None = None) -> None:
        super().__init__(config, shape)
        self.gate = Gate(self.config.gate, model_width=self.shape.model_width, heads=self.shape.heads)

    def reset_parameters(self) -> None:
        self.gate.reset_parameters()

    def focus(self, call: Call) -> MechanismOutput:
        place = call.layout().query_place
        gate, losses = self.gate(call.x, counted=place >= 0)
        attended = call.attend((Window(self.config.window), Causal()), weights=two_way(gate))
        # Up to the width of the window both branches read the same keys, and the gate has no effect.
        records = {"gate": gate.detach(), "decides": place >= self.config.window}
        return MechanismOutput(attended.output, losses, records)
