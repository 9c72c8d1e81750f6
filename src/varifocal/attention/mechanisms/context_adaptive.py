"""A window of input-dependent width against top-k of the whole context: Context-Adaptive Attention (CAA)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from varifocal.attention.gates import CLOSED, Gate, GateConfig
from varifocal.attention.mechanisms.ablation import GATE_TOOLS, Ablation, plain
from varifocal.attention.mechanisms.base import (
    Call,
    HeadShape,
    Mechanism,
    MechanismConfig,
    Overhead,
    Scale,
    two_way,
)
from varifocal.attention.mechanisms.sinks import with_sinks, words_of_sinks
from varifocal.attention.mechanisms.variant import Variant
from varifocal.attention.memories import KeysAndValues, Memory, RankedBlocks
from varifocal.attention.precision import WideLinear, wide_linear
from varifocal.equations.branches import SoftWindow, TopK
from varifocal.equations.branches.base import require_at_least
from varifocal.equations.branches.top_k import Select
from varifocal.equations.equation import Equation


@dataclass(frozen=True, kw_only=True)
class ContextAdaptiveConfig(MechanismConfig):
    """The paper's windows of 256 to 512 tokens, k = O(sqrt n) and 2-layer gate; the rest are ablations."""

    window_min: int = 256
    window_max: int = 512
    edge: int = 32
    """Keys over which the window fades out; through them the width learns."""
    sinks: int = 0
    """First tokens of each document that the window reads too, with their full weight."""
    width: Literal["learned", "fixed"] = "learned"
    """"fixed" keeps every window at the middle of its range."""
    k_scale: float = 1.0
    """c of k_i = max(k_min, ceil(c * sqrt(i + 1)))."""
    k_min: int = 1
    select: Select = "exact"
    """"exact" ranks every key, "blocks" ranks blocks of keys by their mean and reads the best ones."""
    block: int = 64
    reads: Literal["both", "local", "global"] = "both"
    """"local" or "global" drops the other branch and the gate."""
    gate: GateConfig = field(default_factory=lambda: GateConfig(kind="mlp"))

    def __post_init__(self) -> None:
        require_at_least("window_max", self.window_max, 1)
        require_at_least("edge", self.edge, 1)
        require_at_least("sinks", self.sinks, 0)
        if not self.edge <= self.window_min <= self.window_max:
            raise ValueError(
                "windows must satisfy edge <= window_min <= window_max, "
                f"got edge {self.edge}, window_min {self.window_min}, window_max {self.window_max}"
            )
        if self.width not in ("learned", "fixed"):
            raise ValueError(f"width must be 'learned' or 'fixed', got {self.width!r}")
        if self.reads not in ("both", "local", "global"):
            raise ValueError(f"reads must be 'both', 'local' or 'global', got {self.reads!r}")
        self.top_k()

    def top_k(self) -> TopK:
        """The far branch."""
        return TopK(scale=self.k_scale, minimum=self.k_min, select=self.select, block=self.block)


SMALL: dict[str, Any] = {"window_min": 4, "window_max": 11, "edge": 3, "gate": {"hidden": 3}}


class ContextAdaptive(Mechanism[ContextAdaptiveConfig]):
    """g * window attention + (1 - g) * top-k attention; gate and width from the token's own input."""

    name = "context_adaptive"
    config_type = ContextAdaptiveConfig
    ways = {"exact": {"select": "exact"}, "blocks": {"select": "blocks"}}  # noqa: RUF012
    bench_reference = ("exact",)
    variants = (
        Variant(SMALL),
        Variant({**SMALL, "select": "blocks", "block": 4}, "blocks"),
        Variant({**SMALL, "sinks": 2}, "sinks"),
    )
    ablations = (
        Ablation(
            name="constant_gate",
            question="is it the gate, or the fixed half-and-half mix?",
            options=plain(gate={"kind": "constant"}),
        ),
        Ablation(name="static_gate", question="must the gate see the token?", options=plain(gate={"kind": "static"})),
        Ablation(name="linear_gate", question="does the gate need two layers?", options=plain(gate={"kind": "linear"})),
        Ablation(name="fixed_window", question="must the window's width be learned?", options=plain(width="fixed")),
        Ablation(name="local_only", question="what does the window do alone?", options=plain(reads="local")),
        Ablation(name="global_only", question="what do the top k do alone?", options=plain(reads="global")),
        Ablation(name="half_k", question="are fewer keys enough?", options=plain(k_scale=0.5)),
        Ablation(name="double_k", question="do more keys help?", options=plain(k_scale=2.0)),
        Ablation(name="blocks", question="what does selecting by blocks cost?", options=plain(select="blocks")),
        *GATE_TOOLS,
    )

    def __init__(self, config: ContextAdaptiveConfig | None = None, shape: HeadShape | None = None) -> None:
        super().__init__(config, shape)
        width, heads, reads = self.shape.model_width, self.shape.heads, self.config.reads
        self.gate = Gate(self.config.gate, model_width=width, heads=heads) if reads == "both" else None
        learns_width = self.config.width == "learned" and reads != "global"
        self.width = WideLinear(width, heads) if learns_width else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The gate starts at its constant, the width at the middle of its range."""
        if self.gate is not None:
            self.gate.reset_parameters()
        if self.width is not None:
            nn.init.zeros_(self.width.weight)
            nn.init.zeros_(self.width.bias)

    def window_width(self, x: Tensor) -> Tensor:
        """z = lo + (hi - lo) * sigmoid(u.x + b) [B, H, T] from the layer input x [B, T, C]."""
        low, high = self.config.window_min, self.config.window_max
        if self.width is None:
            return x.new_full((x.shape[0], self.shape.heads, x.shape[1]), (low + high) / 2, dtype=torch.float32)
        return low + (high - low) * wide_linear(self.width, x).sigmoid().mT

    def memory(self) -> Memory:
        if self.config.reads != "local" and self.config.select == "blocks":
            return KeysAndValues(RankedBlocks(self.config.block))
        return super().memory()

    def farthest(self) -> int | None:
        return self.config.window_max if self.config.reads == "local" and not self.config.sinks else None

    def equation(self, call: Call) -> Equation:
        config = self.config
        if config.reads == "global":
            return Equation((config.top_k(),))
        soft = SoftWindow(self.window_width(call.x), edge=config.edge, limit=config.window_max)
        window = with_sinks(soft, config.sinks)
        if self.gate is None:
            return Equation((window,))
        gate, losses = self.gate(call.x, counted=call.counted)
        return Equation((window, config.top_k()), two_way(gate), losses=losses)

    @classmethod
    def scaled_options(cls, scale: Scale) -> dict[str, Any]:
        window = scale.window
        return {"window_min": window, "window_max": 2 * window, "edge": max(8, window // 8), "block": scale.block}

    @classmethod
    def dense_options(cls, context: int) -> dict[str, Any]:
        """A gate that starts closed to the window, and a top-k that takes in the whole context."""
        return {"gate": {"start": CLOSED}, "k_min": context}

    def words(self) -> str:
        config = self.config
        sizes = f"a window of {config.window_min} to {config.window_max} keys, as wide as the token asks"
        if config.width == "fixed":
            sizes = f"a window of {(config.window_min + config.window_max) // 2} keys"
        sizes += words_of_sinks(config.sinks)
        best = f"the keys that it rates highest, about {config.k_scale:g} √n of n"
        if config.reads != "both":
            return f"no gate: {sizes if config.reads == 'local' else best}"
        return f"a gate mixes local, {sizes}, with global, {best}"

    def overhead(self, length: int, bytes_per_number: int) -> Overhead:
        config, heads, width = self.config, self.shape.heads, self.shape.head_width
        listed = 0 if config.reads == "local" else config.top_k().listed(length)
        output = bytes_per_number * heads * width if config.select == "blocks" else 0
        return Overhead(
            traffic=24.0 * self.shape.model_width + 230 * heads + 1500,
            operators=81,
            kept=8.0 * config.gate.hidden + heads * (32.0 + 4 * listed) + output,
        )
