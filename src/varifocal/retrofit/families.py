"""Checkpoints of other families: their configs translated into ours, and their weights in our model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from varifocal.attention.mechanisms.registry import nearest
from varifocal.model.checkpoints import filled_model, some
from varifocal.model.config import VarifocalConfig
from varifocal.model.modeling import VarifocalForCausalLM
from varifocal.model.weights import check_kind, with_weights
from varifocal.retrofit.gguf_blocks import load_blocks
from varifocal.retrofit.sources import checked_config, find_place, open_source

SHARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache",
    "tie_word_embeddings", "rope_parameters", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
"""Fields that all families have, with the same meaning as in VarifocalConfig."""


def qwen3_switches(config: PretrainedConfig) -> dict[str, Any]:
    """Qwen3 normalizes queries and keys; a field of its config says whether there are biases."""
    return {"qk_norm": True, "attention_bias": config.attention_bias}


def qwen2_switches(config: PretrainedConfig) -> dict[str, Any]:
    """Qwen2 does not normalize queries and keys; its query, key and value projections have biases."""
    return {"qk_norm": False, "qkv_bias": True}


def llama_switches(config: PretrainedConfig) -> dict[str, Any]:
    """Llama does not normalize queries and keys; if it has biases, all four projections have them."""
    if config.mlp_bias:
        raise ValueError(
            "a Llama checkpoint with mlp_bias=True cannot be loaded: the feed-forward layers here have no bias"
        )
    return {"qk_norm": False, "attention_bias": config.attention_bias}


def varifocal_switches(config: PretrainedConfig) -> dict[str, Any]:
    """A model of ours, to be given another mechanism."""
    return {name: getattr(config, name) for name in ("qk_norm", "qkv_bias", "attention_bias")}


FAMILIES: dict[str, Callable[[PretrainedConfig], dict[str, Any]]] = {
    "qwen3": qwen3_switches,
    "qwen2": qwen2_switches,
    "llama": llama_switches,
    VarifocalConfig.model_type: varifocal_switches,
}
"""The switches of VarifocalConfig by a checkpoint's model_type."""


def load_pretrained(
    source: str | Path,
    *,
    mechanism: str | list[str] = "dense",
    mechanism_options: dict[str, Any] | list[dict[str, Any]] | None = None,
    dtype: torch.dtype | None = None,
    weights: str | None = None,
) -> VarifocalForCausalLM:
    """A Qwen3, Qwen2 or Llama checkpoint as a model of ours, in evaluation mode.

    Args:
        source: a folder or a name on the hub with safetensors; or a .gguf file, also as owner/name/file.gguf.
        mechanism: one for all layers, or a list with one for each; its own parameters start as in a new model.
        mechanism_options: as in VarifocalConfig.
        dtype: the dtype of the weights; None for the one they were saved in (float32 for GGUF).
        weights: how they are held, float32 or int8; None for dtype. As int8, a GGUF file's blocks of Q8_0 and Q4_0 stay
            what they are, and no more than one matrix at a time is widened.
    """
    check_kind(weights, dtype)
    place = find_place(source)
    if weights == "int8" and place.gguf_file is not None:
        foreign = checked_config(place, FAMILIES)
        ours = translate_config(foreign, mechanism=mechanism, mechanism_options=mechanism_options)
        return load_blocks(place, ours, interleaved=foreign.model_type == "llama")
    model = open_source(source, FAMILIES, dtype=dtype)
    return with_weights(take_over(model, mechanism=mechanism, mechanism_options=mechanism_options), weights)


def take_over(
    model: PreTrainedModel,
    *,
    mechanism: str | list[str] = "dense",
    mechanism_options: Any = None,
) -> VarifocalForCausalLM:
    """A model of ours with copies of the weights of a transformers model."""
    if isinstance(model, VarifocalForCausalLM):
        model = with_weights(model, "float32" if model.config.weights else None)
    config = translate_config(model.config, mechanism=mechanism, mechanism_options=mechanism_options)
    weights = {name: value.clone() for name, value in model.state_dict().items() if ".mechanism." not in name}
    where = f"this {model.config.model_type} model"
    # A tensor of another shape may have come this far: transformers takes those of GGUF as they are.
    ours, report = filled_model(config, weights, dtype=model.dtype, where=where)
    foreign = [name for name in report["missing_keys"] if ".mechanism." not in name]
    if foreign or report["unexpected_keys"]:
        wrong = some([*foreign, *report["unexpected_keys"]])
        raise ValueError(f"the weights of {where} do not fit its config: {wrong}")
    if model.generation_config is not None:
        ours.generation_config = model.generation_config
    taken: VarifocalForCausalLM = ours.eval()
    return taken


def translate_config(
    config: PretrainedConfig, *, mechanism: str | list[str] = "dense", mechanism_options: Any = None
) -> VarifocalConfig:
    """The config of a checkpoint as ours, or a ValueError that says what has no counterpart."""
    family = config.model_type
    if family not in FAMILIES:
        raise ValueError(f"unknown architecture {family!r}{nearest(family, FAMILIES)}; known are {', '.join(FAMILIES)}")
    switches = FAMILIES[family](config)
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    windows = sliding_layers(config)
    if any(window is not None for window in windows):
        if mechanism != "dense":
            raise ValueError(
                f"this {family} checkpoint was trained with sliding windows in some layers, and {mechanism!r} would "
                "replace them; load it as 'dense', which keeps them, or give each layer's mechanism in a config"
            )
        mechanism = ["dense" if window is None else "local" for window in windows]
        mechanism_options = [{} if window is None else {"window": window, "sinks": 0} for window in windows]
    return VarifocalConfig(
        **{name: getattr(config, name) for name in SHARED},
        **switches,
        head_dim=head_width,
        mechanism=mechanism,
        mechanism_options=mechanism_options,
    )


def sliding_layers(config: PretrainedConfig) -> list[int | None]:
    """The sliding window of each layer, None where it reads everything; layers of ours have none."""
    types = getattr(config, "layer_types", None)
    if types is None or config.model_type == VarifocalConfig.model_type:
        return [None] * int(config.num_hidden_layers)
    return [config.sliding_window if kind == "sliding_attention" else None for kind in types]
