"""The model that a run starts from: a preset at its random start, or a saved model."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from varifocal.attention.mechanisms.registry import nearest
from varifocal.data import PreparedData
from varifocal.model import VarifocalConfig, VarifocalForCausalLM, load_model, preset
from varifocal.model.checkpoints import read_config
from varifocal.model.reading import one_line
from varifocal.training.config import TrainingConfig
from varifocal.training.opening import require_same_tokenizer


def model_config(config: TrainingConfig, data: PreparedData | None) -> VarifocalConfig:
    """The config of the run's model; without data, as far as it is known without them.

    ValueError of one sentence for whatever does not fit together.
    """
    wanted, length = config.model, config.optimization.length
    entry = None if data is None else data.manifest.tokenizer
    if wanted.start is not None:
        found = read_config(Path(wanted.start))
    else:
        found = preset_config(config, None if entry is None else entry.vocabulary, None if entry is None else entry.end)
    if found.max_position_embeddings < length:
        raise ValueError(
            f"the model reads up to {found.max_position_embeddings} tokens, optimization.length asks for {length}; use "
            "shorter rows or a larger max_position_embeddings"
        )
    if data is not None and entry is not None and entry.vocabulary > found.vocab_size:
        raise ValueError(
            f"{data.folder} has {entry.vocabulary} different tokens, the model knows {found.vocab_size}; prepare the "
            "data with the model's tokenizer, or change the model's vocab_size"
        )
    return found


def preset_config(config: TrainingConfig, vocabulary: int | None, end: int | None) -> VarifocalConfig:
    """The config of a preset, for a tokenizer."""
    wanted = config.model
    known = [one.name for one in fields(VarifocalConfig)]
    for name in wanted.overrides:
        if name not in known:
            raise ValueError(f"model.overrides has the unknown field {name!r}{nearest(name, known)}")
        if name in ("mechanism", "mechanism_options"):
            raise ValueError(f"model.overrides.{name} has a place of its own: model.{name}")
    values: dict[str, Any] = {"max_position_embeddings": config.optimization.length, "eos_token_id": end}
    values |= {} if vocabulary is None else {"vocab_size": vocabulary}
    assert wanted.preset is not None
    assert wanted.mechanism is not None
    try:
        return preset(
            wanted.preset,
            mechanism=wanted.mechanism,
            mechanism_options=wanted.mechanism_options,
            **(values | wanted.overrides),
        )
    except (StrictDataclassError, TypeError) as error:
        raise ValueError(f"the model cannot be made: {one_line(error)}") from error


def starting_model(config: TrainingConfig, data: PreparedData) -> VarifocalForCausalLM:
    """The model in float32, the same for the same seed; what mechanisms have in common is the same in all of them."""
    if config.model.start is not None:
        require_same_tokenizer(Path(config.model.start), data, whose=config.model.start)
        model_config(config, data)
        return load_model(config.model.start, dtype=torch.float32)
    wanted = model_config(config, data)
    torch.manual_seed(config.run.seed)
    model = VarifocalForCausalLM(wanted)
    same = dense_config(wanted)
    if same.to_dict() == wanted.to_dict():
        return model
    # A mechanism's own parameters draw random numbers too, and would shift those of all later layers.
    torch.manual_seed(config.run.seed)
    plain = VarifocalForCausalLM(same)
    model.load_state_dict(plain.state_dict(), strict=False)
    return model


def dense_config(config: VarifocalConfig) -> VarifocalConfig:
    """The same model with dense attention."""
    content: dict[str, Any] = config.to_dict()
    content |= {"mechanism": "dense", "mechanism_options": None}
    found: VarifocalConfig = VarifocalConfig.from_dict(content)
    return found
