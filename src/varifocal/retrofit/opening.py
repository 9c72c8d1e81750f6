"""Opens a model of any kind, with its tokenizer on request: one of ours, a run's, or a pretrained one as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from varifocal.model.checkpoints import load_model
from varifocal.model.config import VarifocalConfig
from varifocal.model.modeling import VarifocalForCausalLM
from varifocal.model.text import load_text_tokenizer
from varifocal.retrofit.families import load_pretrained
from varifocal.retrofit.sources import read_tokenizer


def model_source(source: str | Path) -> str:
    """The source itself; for the folder of a run, its trained model."""
    folder = Path(source)
    if not (folder / "config.json").exists() and (folder / "model" / "config.json").exists():
        return str(folder / "model")
    return str(source)


def is_ours(source: str | Path) -> bool:
    """Whether a source is a folder of our architecture; a broken one counts too, so that our loader names the fault."""
    file = Path(source) / "config.json"
    if not file.is_file():
        return False
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return True
    ours = VarifocalConfig.model_type
    return not isinstance(config, dict) or config.get("model_type") == ours


def open_model(
    source: str | Path, *, dtype: torch.dtype | None = None, weights: str | None = None
) -> VarifocalForCausalLM:
    """The model of a folder, a run, a .gguf file or the hub, in evaluation mode.

    Qwen3, Qwen2 and Llama checkpoints are read as they are, with dense attention.

    Args:
        source: where the model is.
        dtype: the dtype of a pretrained model's weights; None for the one they were saved in.
        weights: how they are held, float32 or int8; None for as they were saved.
    """
    place = model_source(source)
    if is_ours(place):
        return load_model(place, weights=weights)
    return load_pretrained(place, dtype=dtype, weights=weights)


def open_with_tokenizer(source: str | Path, *, weights: str | None = None) -> tuple[VarifocalForCausalLM, Any]:
    """The model and its transformers tokenizer; ValueError if it comes without one."""
    return open_model(source, weights=weights), tokenizer_of(source)


def tokenizer_of(source: str | Path) -> Any:
    """The transformers tokenizer that comes with a model; ValueError if there is none."""
    place = model_source(source)
    tokenizer = load_text_tokenizer(place) if is_ours(place) else read_tokenizer(place)
    if tokenizer is None:
        raise ValueError(f"{source} has no tokenizer; put its tokenizer.json beside the weights")
    return tokenizer
