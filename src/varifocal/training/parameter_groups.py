"""Which parameters decay, which do not, and which belong to the mechanisms and have a learning rate of their own."""

from __future__ import annotations

from typing import Any

from torch import nn


def parameter_groups(
    model: nn.Module, *, learning_rate: float, weight_decay: float, mechanism_factor: float
) -> list[dict[str, Any]]:
    """AdamW's groups, by name: "matrices" decay, "vectors" (norms, biases) do not, "mechanism" has its own rate.

    Mechanism parameters are all that the mechanisms own: gate networks, window widths, pair networks and scales,
    indexers. Groups without parameters are left out.
    """
    groups: dict[str, list[nn.Parameter]] = {"matrices": [], "vectors": [], "mechanism": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[group_of(name, parameter)].append(parameter)
    settings = {
        "matrices": {"lr": learning_rate, "weight_decay": weight_decay},
        "vectors": {"lr": learning_rate, "weight_decay": 0.0},
        "mechanism": {"lr": learning_rate * mechanism_factor, "weight_decay": 0.0},
    }
    return [{"params": found, "name": name, **settings[name]} for name, found in groups.items() if found]


def group_of(name: str, parameter: nn.Parameter) -> str:
    """The group of a parameter by its full name."""
    if ".mechanism." in name:
        return "mechanism"
    return "matrices" if parameter.ndim >= 2 else "vectors"
