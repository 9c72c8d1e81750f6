"""Each head balances a window against the whole context: Dynamic Sparse Attention with Learned Head Gating."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from varifocal.attention.gates import CLOSED, Gate, GateConfig
from varifocal.attention.mechanisms.ablation import GATE_TOOLS, Ablation, plain
from varifocal.attention.mechanisms.base import (
    Call,
    HeadShape,
    Mechanism,
    MechanismConfig,
    Overhead,
    Scale,
    Step,
    two_way,
)
from varifocal.attention.mechanisms.sinks import with_sinks, words_of_sinks
from varifocal.attention.mechanisms.variant import Variant
from varifocal.equations.branches import Branch, Causal, Window
from varifocal.equations.branches.base import require_at_least
from varifocal.equations.equation import Equation


@dataclass(frozen=True, kw_only=True)
class HeadGatedConfig(MechanismConfig):
    """The paper's 256-token window, and its gate g = sigmoid(W x + b)."""

    window: int = 256
    """Keys of the near branch, the query's own included."""
    sinks: int = 0
    """First tokens of each document that the near branch reads too."""
    gate: GateConfig = field(default_factory=lambda: GateConfig(kind="linear"))

    def __post_init__(self) -> None:
        require_at_least("window", self.window, 1)
        require_at_least("sinks", self.sinks, 0)


class HeadGated(Mechanism[HeadGatedConfig]):
    """g * window attention + (1 - g) * dense attention, with g from the token's own input, one for each head."""

    name = "head_gated"
    config_type = HeadGatedConfig
    variants = (Variant({"window": 5}), Variant({"window": 5, "sinks": 2}, "sinks"))
    ablations = (
        Ablation(
            name="no_gate",
            question="is it the gate, or the fixed half-and-half mix?",
            options=plain(gate={"kind": "constant"}),
        ),
        Ablation(name="static_gate", question="must the gate see the token?", options=plain(gate={"kind": "static"})),
        Ablation(
            name="quarter_window",
            question="a window of 64 for the paper's 256",
            options=lambda sizes: {"window": max(1, sizes.window // 4)},
        ),
        Ablation(
            name="half_window",
            question="a window of 128 for the paper's 256",
            options=lambda sizes: {"window": max(1, sizes.window // 2)},
        ),
        Ablation(
            name="double_window",
            question="a window of 512 for the paper's 256",
            options=lambda sizes: {"window": 2 * sizes.window},
        ),
        *GATE_TOOLS,
    )

    def __init__(self, config: HeadGatedConfig | None = None, shape: HeadShape | None = None) -> None:
        super().__init__(config, shape)
        self.gate = Gate(self.config.gate, model_width=self.shape.model_width, heads=self.shape.heads)

    def reset_parameters(self) -> None:
        self.gate.reset_parameters()

    @property
    def branches(self) -> tuple[Branch, Branch]:
        """Near and far."""
        return with_sinks(Window(self.config.window), self.config.sinks), Causal()

    def equation(self, call: Call) -> Equation:
        gate, losses = self.gate(call.x, counted=call.counted)
        return Equation(self.branches, two_way(gate), losses=losses)

    def step(self) -> Step | None:
        return Step(self.branches, self.gate)

    @classmethod
    def scaled_options(cls, scale: Scale) -> dict[str, Any]:
        return {"window": scale.window}

    @classmethod
    def dense_options(cls, context: int) -> dict[str, Any]:
        """A gate that starts closed to the window."""
        return {"gate": {"start": CLOSED}}

    def words(self) -> str:
        near = f"the last {self.config.window} keys{words_of_sinks(self.config.sinks)}"
        return f"a gate mixes local, {near}, with global, every key"

    def overhead(self, length: int, bytes_per_number: int) -> Overhead:
        heads, width = self.shape.heads, self.shape.head_width
        return Overhead(
            traffic=12.0 * self.shape.model_width + 160 * heads,
            operators=27,
            kept=bytes_per_number * heads * width + 24.0 * heads,
        )
