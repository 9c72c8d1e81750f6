"""Opens a model of any kind together with its tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from varifocal.model import VarifocalConfig, VarifocalForCausalLM, load_model
from varifocal.model.text import load_text_tokenizer
from varifocal.retrofit import load_pretrained
from varifocal.retrofit.sources import read_tokenizer


@dataclass(frozen=True, eq=False)
class OpenedModel:
    """A model and how it reads text."""

    name: str
    """What the page calls it."""
    model: VarifocalForCausalLM
    tokenizer: Any
    """A fast tokenizer of transformers: one that knows which characters each token covers."""


def open_model(source: str) -> OpenedModel:
    """The model of a folder, a .gguf file or the hub; of a run's folder, the model that the run left.

    Qwen3, Qwen2 and Llama checkpoints are read as they are, with dense attention.
    """
    if not (Path(source) / "config.json").exists() and (Path(source) / "model" / "config.json").exists():
        source = str(Path(source) / "model")
    folder = Path(source)
    if (folder / "config.json").is_file() and is_ours(folder):
        opened = OpenedModel(model_name(folder), load_model(folder), load_text_tokenizer(folder))
    else:
        model, tokenizer = load_pretrained(source), read_tokenizer(source)
        if tokenizer is None:
            raise ValueError(f"{source} holds no tokenizer; put its tokenizer.json beside the weights")
        opened = OpenedModel(model_name(folder), model, tokenizer)
    if not opened.tokenizer.is_fast:
        raise ValueError(
            f"the tokenizer of {source} does not say which characters a token covers; put a tokenizer.json beside it"
        )
    return opened


def is_ours(folder: Path) -> bool:
    """Whether a folder's config is of our architecture; of a broken one, our loader says what is wrong."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError:
        return True
    return not isinstance(config, dict) or config.get("model_type") == VarifocalConfig.model_type


def model_name(folder: Path) -> str:
    """The folder's name; for `.../run/model`, the run's."""
    path = folder.absolute()
    return path.parent.name if path.name == "model" else path.name
