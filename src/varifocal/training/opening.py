"""Opens a model for prepared data: both must mean the same by every token."""

from __future__ import annotations

from pathlib import Path

import torch

from varifocal.data import PreparedData
from varifocal.model.modeling import VarifocalForCausalLM
from varifocal.retrofit.opening import model_source, open_model


def open_model_for(source: str | Path, data: PreparedData) -> VarifocalForCausalLM:
    """A model of any kind, in evaluation mode; ValueError unless it was made for the tokens of the data."""
    require_same_tokenizer(Path(model_source(source)), data)
    model = open_model(source, dtype=torch.float32)
    vocabulary = data.manifest.tokenizer.vocabulary
    if vocabulary > model.config.vocab_size:
        raise ValueError(
            f"{data.folder} has {vocabulary} different tokens, {source} knows {model.config.vocab_size}; prepare the "
            "data with the model's tokenizer"
        )
    return model


def require_same_tokenizer(folder: Path, data: PreparedData, *, whose: str = "the model") -> None:
    """ValueError if a model's folder carries another tokenizer than the data."""
    from varifocal.data.tokenizers import load_tokenizer

    own = folder / "tokenizer.json"
    if own.is_file():
        tokenizer = load_tokenizer(own, name=str(own), end_token=data.manifest.tokenizer.end_token)
        data.require_tokenizer(tokenizer.fingerprint, whose=whose)
