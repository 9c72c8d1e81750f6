"""Models by name, and each mechanism's options scaled to their context."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from varifocal.attention.mechanisms.base import Scale
from varifocal.attention.mechanisms.registry import mechanism_type, nearest
from varifocal.model.config import VarifocalConfig


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The sizes of a model."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    feed_forward: int
    context: int
    """Tokens of a training text."""
    window: int
    """Keys of a near branch; the papers' 256 for their contexts."""


PRESETS: dict[str, Preset] = {
    "qwen-134m": Preset(
        vocabulary=151_936, width=512, layers=12, heads=12, kv_heads=6, head_width=128, feed_forward=1536,
        context=2048, window=256,
    ),
    "qwen-132m": Preset(
        vocabulary=151_936, width=512, layers=12, heads=12, kv_heads=6, head_width=128, feed_forward=1408,
        context=2048, window=256,
    ),
    "small": Preset(
        vocabulary=8192, width=256, layers=8, heads=8, kv_heads=4, head_width=32, feed_forward=768,
        context=1024, window=128,
    ),
    "tiny": Preset(
        vocabulary=4096, width=128, layers=4, heads=4, kv_heads=2, head_width=32, feed_forward=384,
        context=512, window=64,
    ),
}  # fmt: skip
"""The papers' model in its two readings, and two that train on a laptop in minutes."""


def preset(
    name: str,
    *,
    mechanism: str | list[str] = "dense",
    vocab_size: int | None = None,
    **overrides: Any,
) -> VarifocalConfig:
    """The config of a named model.

    Args:
        name: one of PRESETS.
        mechanism: one for all layers, or a list with one for each.
        vocab_size: the tokenizer's, if it is not the preset's.
        overrides: fields of VarifocalConfig. Options in `mechanism_options` are laid over those of the preset,
            which follow `max_position_embeddings` if that is given.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}{nearest(name, PRESETS)}; known are {', '.join(PRESETS)}")
    sizes = PRESETS[name]
    sizes = replace(sizes, context=overrides.pop("max_position_embeddings", sizes.context))
    given = overrides.pop("mechanism_options", None)
    fields: dict[str, Any] = {
        "vocab_size": sizes.vocabulary if vocab_size is None else vocab_size,
        "hidden_size": sizes.width,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_width,
        "intermediate_size": sizes.feed_forward,
        "max_position_embeddings": sizes.context,
        "tie_word_embeddings": True,
        # The base of Qwen3's own checkpoints; its config class defaults to another.
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    options: Any
    if isinstance(mechanism, str):
        options = scaled_options(mechanism, sizes) | (given or {})
    elif isinstance(given, list):
        options = [scaled_options(one, sizes) | more for one, more in zip(mechanism, given, strict=True)]
    else:
        # Options by mechanism: all layers that have it share them.
        options = {one: scaled_options(one, sizes) | (given or {}).get(one, {}) for one in mechanism}
    return VarifocalConfig(**(fields | {"mechanism": mechanism, "mechanism_options": options} | overrides))


def scaled_options(mechanism: str, sizes: Preset) -> dict[str, Any]:
    """The options of a mechanism that follow a model's sizes, as the mechanism itself says."""
    scale = Scale(context=sizes.context, window=sizes.window, head_width=sizes.head_width, kv_heads=sizes.kv_heads)
    return mechanism_type(mechanism).scaled_options(scale)
