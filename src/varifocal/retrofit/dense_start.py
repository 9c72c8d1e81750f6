"""How each mechanism starts as dense attention: with which options, with which parameters, and how nearly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from varifocal.attention.gates import GateConfig
from varifocal.attention.mechanisms import MechanismConfig
from varifocal.attention.mechanisms.bigbird import BigBirdConfig
from varifocal.attention.mechanisms.combiner import CombinerConfig
from varifocal.attention.mechanisms.context_adaptive import ContextAdaptiveConfig
from varifocal.attention.mechanisms.dense import DenseConfig
from varifocal.attention.mechanisms.dynamic_sparse import DynamicSparseConfig
from varifocal.attention.mechanisms.head_gated import HeadGatedConfig
from varifocal.attention.mechanisms.local import LocalConfig
from varifocal.attention.mechanisms.sparse_geometric import SparseGeometric, SparseGeometricConfig
from varifocal.attention.mechanisms.sparse_transformer import SparseTransformerConfig
from varifocal.equations.branches import TopK
from varifocal.model.config import VarifocalConfig
from varifocal.model.presets import Preset, scaled_options

CLOSED = -12.0
"""The logit at which gates start: the new branch has a weight of 6e-6, and a gradient that is still a number."""


def starting_options(
    mechanism: str, sizes: VarifocalConfig, *, context: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The options with which a mechanism takes the place of dense attention in a trained model.

    Windows and blocks are those of the presets for this context. Gates start closed to the window, and the top-k of
    `context_adaptive` takes in the whole context; both can be overruled.

    Args:
        mechanism: its stem.
        sizes: a config with the model's sizes.
        context: the longest text that is to start as it was.
        options: those that were asked for, laid over all others.
    """
    scaled = scaled_options(
        mechanism,
        Preset(
            vocabulary=sizes.vocab_size,
            width=sizes.hidden_size,
            layers=sizes.num_hidden_layers,
            heads=sizes.num_attention_heads,
            kv_heads=sizes.num_key_value_heads,
            head_width=sizes.head_dim,
            feed_forward=sizes.intermediate_size,
            context=context,
            window=max(8, min(256, context // 8)),
        ),
    )
    closed: dict[str, dict[str, Any]] = {
        "head_gated": {"gate": {"start": CLOSED}},
        "context_adaptive": {"gate": {"start": CLOSED}, "k_min": context},
    }
    chosen = scaled | closed.get(mechanism, {})
    for name, value in options.items():
        nested = isinstance(value, Mapping) and isinstance(chosen.get(name), Mapping)
        chosen[name] = {**chosen[name], **value} if nested else value
    return chosen


def foreign_share(config: MechanismConfig, context: int) -> float | None:
    """How much of what a new mechanism reads is not dense attention, for texts of up to `context` tokens.

    0 promises dense attention to rounding. A number g above 0 promises (1 - g) dense + g another convex mean of values,
    so that no head's output moves by more than 2 g max |v|. None promises nothing.
    """
    covered = 0
    match config:
        case DenseConfig():
            return 0.0
        case HeadGatedConfig():
            return 0.0 if config.window >= context else starting_gate(config.gate)
        case ContextAdaptiveConfig():
            if config.reads != "local" and not reads_all(config.top_k(), context):
                return None
            if config.reads == "global":
                return 0.0
            if (config.window_min + config.window_max) / 2 - config.edge >= context:
                return 0.0
            return starting_gate(config.gate) if config.reads == "both" else None
        case DynamicSparseConfig():
            return 0.0 if reads_all(config.top_k(None), context) else None
        case SparseGeometricConfig():
            return 0.0 if has_neutral_start(config, context) else None
        case LocalConfig() | BigBirdConfig():
            covered = config.window + config.global_tokens
        case CombinerConfig():
            covered = config.segment
        case SparseTransformerConfig():
            covered = config.stride
    return 0.0 if covered >= context else None


def starting_gate(gate: GateConfig) -> float:
    """The value sigmoid(start), capped, of every gate before it is trained."""
    logit = gate.start if gate.soft_cap is None else gate.soft_cap * math.tanh(gate.start / gate.soft_cap)
    return torch.tensor(logit).sigmoid().item()


def reads_all(top_k: TopK, context: int) -> bool:
    """Whether top-k takes in every key of a text of `context` tokens."""
    return bool(top_k.reads_everything(torch.arange(context)).all())


def has_neutral_start(config: SparseGeometricConfig, context: int) -> bool:
    """Whether `start_neutral` can make every pair count as in dense attention."""
    if config.sparsity == "fixed":
        return config.stride >= context
    if config.sparsity == "none" or config.form == "log":
        return True
    if config.form == "threshold":
        return constant_gate(config) >= config.threshold
    return config.scaling


def constant_gate(config: SparseGeometricConfig) -> float:
    """sigmoid(bias): the gate of every pair while the network's last layer is zero."""
    return 1 / (1 + math.exp(-(config.bias or 0.0)))


@torch.no_grad()
def start_neutral(model: nn.Module) -> None:
    """Set the pair networks of `sparse_geometric` in a model such that they start as dense attention.

    With a zero last layer the gate of every pair is the same s. In the paper's product the head's scale takes it back,
    softplus(gamma) = 1 / s; beside the score, as log s, it moves all scores alike and softmax does not see it.
    """
    for module in model.modules():
        if not isinstance(module, SparseGeometric):
            continue
        scale = 1.0
        if module.output_weight is not None:
            nn.init.zeros_(module.output_weight)
            scale = 1 / constant_gate(module.config) if module.config.form == "product" else 1.0
        if module.gamma is not None:
            nn.init.constant_(module.gamma, math.log(math.expm1(scale)))
