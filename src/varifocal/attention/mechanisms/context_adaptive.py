"""A window of input-dependent width against top-k of the whole context: Context-Adaptive Attention (CAA)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from varifocal.attention.gates import Gate, GateConfig
from varifocal.attention.mechanisms.base import (
    Call,
    HeadShape,
    Mechanism,
    MechanismConfig,
    MechanismOutput,
    RankedBlocks,
    two_way,
)
from varifocal.attention.precision import wide_linear
from varifocal.equations.branches import SoftWindow, TopK
from varifocal.equations.branches.base import require_at_least
from varifocal.equations.branches.top_k import Select


@dataclass(frozen=True, kw_only=True)
class ContextAdaptiveConfig(MechanismConfig):
    """The paper's windows of 256 to 512 tokens, k = O(sqrt n) and 2-layer gate; the rest are ablations."""

    window_min: int = 256
    window_max: int = 512
    edge: int = 32
    """Keys over which the window fades out; through them the width learns."""
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

    def top_k(self, pooled: Tensor | None = None) -> TopK:
        """The global branch."""
        return TopK(scale=self.k_scale, minimum=self.k_min, select=self.select, block=self.block, pooled=pooled)


class ContextAdaptive(Mechanism[ContextAdaptiveConfig]):
    """g * window attention + (1 - g) * top-k attention; gate and width from the token's own input."""

    name = "context_adaptive"
    config_type = ContextAdaptiveConfig

    def __init__(self, config: ContextAdaptiveConfig | None = None, shape: HeadShape | None = None) -> None:
        super().__init__(config, shape)
        width, heads, reads = self.shape.model_width, self.shape.heads, self.config.reads
        self.gate = Gate(self.config.gate, model_width=width, heads=heads) if reads == "both" else None
        learns_width = self.config.width == "learned" and reads != "global"
        self.width = nn.Linear(width, heads) if learns_width else None
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

    def ranked_blocks(self, k: Tensor, memory: Tensor | None) -> RankedBlocks | None:
        ranks = self.config.select == "blocks" and self.config.reads != "local"
        return RankedBlocks(k, self.config.block) if ranks else None

    def focus(self, call: Call) -> MechanismOutput:
        config, records = self.config, {}
        top_k = config.top_k(call.pooled)
        if config.reads == "global":
            attended = call.attend(top_k)
        else:
            width = self.window_width(call.x)
            records["width"] = width.detach()
            window = SoftWindow(width, edge=config.edge, limit=config.window_max)
            if config.reads == "local":
                return MechanismOutput(call.attend(window).output, records=records)
        losses: dict[str, Tensor] = {}
        if self.gate is not None:
            place = call.layout().query_place
            gate, losses = self.gate(call.x, counted=place >= 0)
            attended = call.attend((window, top_k), weights=two_way(gate))
            # While top-k takes every key and the window has not begun to fade, both read the same.
            same = top_k.reads_everything(place)[:, None] & (place[:, None] <= width - config.edge)
            records |= {"gate": gate.detach(), "decides": (place >= 0)[:, None] & ~same}
        selected = attended.selected[-1]
        if selected is not None:
            records["selected"] = selected
        return MechanismOutput(attended.output, losses, records)
