"""Which parameters decay, which do not, and which are gates with a learning rate of their own."""

from __future__ import annotations

from typing import Any

from torch import nn


def parameter_groups(
    model: nn.Module, *, learning_rate: float, weight_decay: float, gate_factor: float
) -> list[dict[str, Any]]:
    """AdamW's groups, by name: "matrices" decay, "vectors" (norms, biases) do not, "gates" have their own rate.

    Gates are all parameters of the mechanisms: gate networks, window widths, pair networks and scales, indexers.
    Groups without parameters are left out.
    """
    chosen: dict[str, list[nn.Parameter]] = {"matrices": [], "vectors": [], "gates": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            chosen[group_of(name, parameter)].append(parameter)
    settings = {
        "matrices": {"lr": learning_rate, "weight_decay": weight_decay},
        "vectors": {"lr": learning_rate, "weight_decay": 0.0},
        "gates": {"lr": learning_rate * gate_factor, "weight_decay": 0.0},
    }
    return [{"params": found, "name": name, **settings[name]} for name, found in chosen.items() if found]


def group_of(name: str, parameter: nn.Parameter) -> str:
    """The group of a parameter by its full name."""
    if ".mechanism." in name:
        return "gates"
    return "matrices" if parameter.ndim >= 2 else "vectors"
