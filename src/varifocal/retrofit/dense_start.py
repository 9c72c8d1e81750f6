"""The options with which a mechanism replaces dense attention in a trained model, and how exactly it does so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from varifocal.attention.mechanisms import Mechanism
from varifocal.attention.mechanisms.base import Scale, typical_equation
from varifocal.attention.mechanisms.registry import mechanism_type
from varifocal.model.config import VarifocalConfig


def starting_options(
    mechanism: str, sizes: VarifocalConfig, *, context: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The options with which a mechanism replaces dense attention in a trained model.

    Windows and blocks are those of the presets for this context; the mechanism itself says what else it needs to start
    as dense attention. `options` override both.

    Args:
        mechanism: its stem.
        sizes: a config with the model's sizes.
        context: the longest text on which the model must start as it was.
        options: the options that were asked for; they override all others.
    """
    kind = mechanism_type(mechanism)
    window = max(8, min(256, context // 8))
    scale = Scale(context=context, window=window, head_width=sizes.head_dim, kv_heads=sizes.num_key_value_heads)
    starting = kind.scaled_options(scale) | kind.dense_options(context)
    for name, value in options.items():
        nested = isinstance(value, Mapping) and isinstance(starting.get(name), Mapping)
        starting[name] = {**starting[name], **value} if nested else value
    return starting


def foreign_share(mechanism: Mechanism[Any], context: int) -> float | None:
    """The share of a mechanism's output that is not dense attention at its start, for texts of up to `context` tokens.

    0 promises dense attention up to rounding. A number g above 0 promises (1 - g) dense + g (another convex mean of
    values), so that no head's output moves by more than 2 g max |v|. None promises nothing.
    """
    if not mechanism.rotates:
        return None
    place = torch.arange(context)
    # With zero inputs alone, a gate or score that depends on its input would look as if it did not.
    shares = [typical_equation(mechanism, context, seed=seed).foreign_share(place) for seed in (None, 0)]
    return None if None in shares else max(share for share in shares if share is not None)


def start_as_dense(model: nn.Module) -> None:
    """Set the mechanisms inside a model so that they start as dense attention, as far as they can."""
    for module in model.modules():
        if isinstance(module, Mechanism):
            module.start_as_dense()
