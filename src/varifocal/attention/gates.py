"""Gates: how much of the near and how much of the far a head reads, decided by the token itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from varifocal.attention.precision import WideLinear, wide, wide_linear

CLOSED = -12.0
"""The logit of a gate that starts closed: its branch has a weight of 6e-6, and a gradient that is still a number."""
GateKind = Literal["mlp", "linear", "static", "constant"]


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """A gate for every token and head, and the tools that keep its training stable, each off by default."""

    kind: GateKind = "linear"
    """"mlp": two layers; "linear": one; "static": a learned number per head; "constant": nothing is learned."""
    hidden: int = 64
    """Width of the hidden layer, for kind="mlp"."""
    start: float = 0.0
    """The logit at the start; 0 is a gate of 1/2, where the sigmoid is steepest."""
    soft_cap: float | None = None
    """c of c * tanh(z / c): bounds the logit, so that no gate saturates for good (Gemma 2, arXiv:2408.00118)."""
    z_loss: float = 0.0
    """Coefficient of the mean squared logit before the cap (after ST-MoE, arXiv:2202.08906)."""
    normalize_gradient: float | None = None
    """Rescales the gradient that the attention sends to the logits, head by head, to this root mean square over
    the tokens of the batch where it is not 0. The gradient then depends on what else is in the batch: accumulated
    micro-batches are not one big batch."""

    def __post_init__(self) -> None:
        if self.kind not in ("mlp", "linear", "static", "constant"):
            raise ValueError(f"gate kind must be 'mlp', 'linear', 'static' or 'constant', got {self.kind!r}")
        if self.hidden < 1:
            raise ValueError(f"gate hidden width must be at least 1, got {self.hidden}")
        if not math.isfinite(self.start):
            raise ValueError(f"gate start must be a finite logit, got {self.start}")
        if self.soft_cap is not None and not 0 < self.soft_cap < math.inf:
            raise ValueError(
                f"gate soft_cap must be a finite number above 0, got {self.soft_cap}; None switches it off"
            )
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(f"gate z_loss must be a finite number of at least 0, got {self.z_loss}")
        if self.normalize_gradient is not None and not 0 < self.normalize_gradient < math.inf:
            raise ValueError(
                f"gate normalize_gradient must be finite and above 0, got {self.normalize_gradient}; "
                "None switches it off"
            )


class Gated(NamedTuple):
    """What a gate decided."""

    value: Tensor
    """[B, H, T], between 0 and 1, in float32 or wider."""
    losses: dict[str, Tensor]
    """Auxiliary losses, with their coefficients, to be added to the loss."""


class Gate(nn.Module):
    """g = sigmoid(start + warmth * f(x)), with f the small network of the config, zero before it is trained.

    Its parameters belong in an optimiser group of their own, without weight decay.
    """

    warmth: Tensor
    """0 holds the gate at its start (warm-up with a fixed gate), 1 is the learned gate; see `set_gate_warmth`."""

    def __init__(self, config: GateConfig, *, model_width: int, heads: int) -> None:
        super().__init__()
        self.config = config
        self.heads = heads
        self.hidden = WideLinear(model_width, config.hidden) if config.kind == "mlp" else None
        inputs = {"mlp": config.hidden, "linear": model_width}.get(config.kind)
        self.output = WideLinear(inputs, heads) if inputs is not None else None
        self.static = nn.Parameter(torch.empty(heads)) if config.kind == "static" else None
        self.register_buffer("warmth", torch.ones(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start constant: the last layer is zero, a hidden layer is scaled by its fan-in."""
        if self.hidden is not None:
            nn.init.normal_(self.hidden.weight, std=self.hidden.in_features**-0.5)
            nn.init.zeros_(self.hidden.bias)
        if self.output is not None:
            nn.init.zeros_(self.output.weight)
            nn.init.zeros_(self.output.bias)
        if self.static is not None:
            nn.init.zeros_(self.static)
        nn.init.ones_(self.warmth)

    def forward(self, x: Tensor, *, counted: Tensor | None = None) -> Gated:
        """Gates for the layer's normed input x [B, T, C]; `counted` bool [B, T] marks the tokens of the z-loss."""
        learned = self.learned_logits(wide(x))  # [B, H, T]
        logits = self.config.start + self.warmth.to(learned.dtype) * learned
        losses = {}
        if self.config.z_loss:
            # Before the cap: a capped logit could not tell how far it was pushed.
            losses["gate_z"] = self.config.z_loss * mean_over(logits.square(), counted)
        if self.config.normalize_gradient is not None:
            logits = normalize_gradient(logits, self.config.normalize_gradient)
        if self.config.soft_cap is not None:
            logits = self.config.soft_cap * torch.tanh(logits / self.config.soft_cap)
        return Gated(logits.sigmoid(), losses)

    def learned_logits(self, x: Tensor) -> Tensor:
        """f(x) [B, H, T]."""
        if self.output is not None:
            if self.hidden is not None:
                x = F.gelu(wide_linear(self.hidden, x))
            return wide_linear(self.output, x).mT
        batch, length, _ = x.shape
        if self.static is not None:
            return self.static.to(x.dtype)[:, None].expand(batch, self.heads, length)
        return x.new_zeros(batch, self.heads, length)


def set_gate_warmth(module: nn.Module, warmth: float) -> None:
    """Set how far all gates inside `module` follow what they learned: 0 not at all, 1 fully."""
    if not 0 <= warmth <= 1:
        raise ValueError(f"gate warmth must lie between 0 and 1, got {warmth}")
    for gate in module.modules():
        if isinstance(gate, Gate):
            gate.warmth.fill_(warmth)


def mean_over(values: Tensor, counted: Tensor | None) -> Tensor:
    """The mean of values [B, H, T] over heads and the counted tokens [B, T]; 0 if none counts."""
    if counted is None:
        return values.mean()
    counts = counted[:, None].to(values.dtype).expand_as(values)
    return (values * counts).sum() / counts.sum().clamp(min=1)


def normalize_gradient(logits: Tensor, target: float) -> Tensor:
    """The logits [B, H, T] unchanged; their gradient rescaled per head to the root mean square `target`."""
    return _NormalizeGradient.apply(logits, target)  # type: ignore[no-any-return, no-untyped-call]


class _NormalizeGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: float) -> Tensor:
        ctx.target = target
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Padding, and tokens whose branches read the same keys, have gradient 0 and would dilute the mean.
        reached = (gradient != 0).sum(dim=(0, 2), keepdim=True).clamp(min=1)
        size = (gradient.square().sum(dim=(0, 2), keepdim=True) / reached).sqrt()  # [1, H, 1]
        return gradient * torch.where(size > 0, ctx.target / size.clamp(min=torch.finfo(size.dtype).tiny), 0.0), None
