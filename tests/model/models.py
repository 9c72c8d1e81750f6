"""Small models for the tests: every mechanism at sizes for which 24 tokens are a long text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from varifocal import MECHANISMS, Mechanism
from varifocal.model import VarifocalConfig, VarifocalForCausalLM

VOCABULARY = 61

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    # Logits of some size: nearly uniform ones would hide mistakes.
    "initializer_range": 0.3,
}

WINDOWS = {"window_min": 4, "window_max": 11, "edge": 3, "gate": {"hidden": 3}}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "local": ("local", {"window": 5, "sinks": 2}),
    "local window": ("local", {"window": 5, "sinks": 0}),
    "combiner": ("combiner", {"segment": 4}),
    "dynamic_sparse": ("dynamic_sparse", {"rank": 3, "k_min": 2}),
    "dynamic_sparse blocks": ("dynamic_sparse", {"rank": 3, "select": "blocks", "block": 4}),
    "dynamic_sparse input": ("dynamic_sparse", {"rank": 3, "prediction": "input"}),
    "context_adaptive": ("context_adaptive", WINDOWS),
    "context_adaptive blocks": ("context_adaptive", {**WINDOWS, "select": "blocks", "block": 4}),
    "context_adaptive window": ("context_adaptive", {**WINDOWS, "reads": "local"}),
    "head_gated": ("head_gated", {"window": 5}),
    "sparse_geometric": ("sparse_geometric", {"hidden": 3}),
    "bigbird": ("bigbird", {"window": 4, "global_tokens": 2, "random_blocks": 2, "block": 3}),
    "sparse_transformer": ("sparse_transformer", {"stride": 5}),
    "focused": ("focused", {"windows": (None, 5), "sinks": 2}),
    "focused windows": ("focused", {"windows": (3, 6), "sinks": 1, "sink_logit": True}),
    "positional_prior": ("positional_prior", {"rotary": False}),
    "adaptively_sparse": ("adaptively_sparse", {}),
    "routing": ("routing", {"clusters": 3, "members": 4, "window": 5}),
    "fastmax": ("fastmax", {"order": 2}),
    "infini": ("infini", {"segment": 5}),
    "infini delta": ("infini", {"segment": 4, "delta": True}),
    "relative_position": ("relative_position", {"clip": 3, "values": True}),
}
"""By name: a mechanism and its options."""

assert {mechanism for mechanism, _ in VARIANTS.values()} == set(MECHANISMS.ours)


def small_config(variant: str = "dense", **changes: Any) -> VarifocalConfig:
    """The config of a small model."""
    mechanism, options = VARIANTS[variant]
    return VarifocalConfig(**(SIZES | {"mechanism": mechanism, "mechanism_options": options} | changes))


def small_model(variant: str = "dense", *, seed: int = 0, **changes: Any) -> VarifocalForCausalLM:
    """A small model in evaluation mode whose parameters are all random: at their start, gates would be constant."""
    torch.manual_seed(seed)
    model = VarifocalForCausalLM(small_config(variant, **changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mechanism" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.5)
    model.eval()
    return model


def mechanisms(model: VarifocalForCausalLM) -> list[Any]:
    """The mechanism of each layer."""
    return [module for module in model.modules() if isinstance(module, Mechanism)]


def random_tokens(batch: int, length: int, *, seed: int = 1) -> Tensor:
    """Token ids [B, T]."""
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def saved_fields(config: VarifocalConfig) -> dict[str, Any]:
    """What config.json holds, without what belongs to the file and not to the model."""
    fields: dict[str, Any] = config.to_dict()
    return {name: value for name, value in fields.items() if name not in ("_name_or_path", "dtype", "architectures")}
