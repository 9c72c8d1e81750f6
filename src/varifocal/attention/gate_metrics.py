"""What gates do: numbers that show in time when a gate stops deciding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from varifocal.attention.gates import Gate


class GateStatistics(NamedTuple):
    """Per head [H], over the tokens where the gate decides anything."""

    mean: Tensor
    deviation: Tensor
    saturated: Tensor
    """The share of gates below 0.05 or above 0.95."""
    entropy: Tensor
    """The mean entropy of (g, 1 - g) in bits: 1 for a gate of 1/2, 0 for a saturated one."""
    tokens: Tensor
    """How many tokens were counted."""


def gate_statistics(gates: Tensor, decides: Tensor | None = None, *, margin: float = 0.05) -> GateStatistics:
    """Statistics of gates [B, H, T]; `decides` bool [B, T] or [B, H, T] leaves out tokens whose gate has no effect.

    Where both branches read the same keys a gate's gradient is exactly 0, so its value there means nothing.
    """
    gates = gates.detach().double()
    counted = torch.ones_like(gates, dtype=torch.bool)
    if decides is not None:
        counted = (decides if decides.ndim == 3 else decides[:, None]).expand_as(gates)
    tokens = counted.sum(dim=(0, 2))

    def mean(values: Tensor) -> Tensor:
        return torch.where(counted, values, 0.0).sum(dim=(0, 2)) / tokens

    average = mean(gates)
    saturated = ((gates < margin) | (gates > 1 - margin)).double()
    # xlogy is 0 at 0, where g log g would be NaN for a gate that is fully closed.
    entropy = -(torch.xlogy(gates, gates) + torch.xlogy(1 - gates, 1 - gates)) / torch.log(gates.new_tensor(2.0))
    return GateStatistics(
        mean=average,
        deviation=mean((gates - average[:, None]).square()).sqrt(),
        saturated=mean(saturated),
        entropy=mean(entropy),
        tokens=tokens,
    )


def gate_gradient_norms(module: nn.Module) -> dict[str, Tensor]:
    """For each gate inside `module` by name: the norm [H] of the gradient that reaches each head's last layer."""
    norms = {}
    for name, gate in module.named_modules():
        if isinstance(gate, Gate):
            heads = [parameter.grad for parameter in last_layer(gate) if parameter.grad is not None]
            if heads:
                squares = [gradient.double().reshape(gate.heads, -1).square().sum(dim=1) for gradient in heads]
                norms[name] = torch.stack(squares).sum(dim=0).sqrt()
    return norms


def last_layer(gate: Gate) -> list[nn.Parameter]:
    """The parameters of a gate that belong to one head each."""
    if gate.output is not None:
        return list(gate.output.parameters())
    return [] if gate.static is None else [gate.static]
