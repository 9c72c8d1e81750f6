"""Opens a model of any kind together with its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from varifocal.model import VarifocalForCausalLM
from varifocal.retrofit.opening import model_source, open_with_tokenizer


@dataclass(frozen=True, eq=False)
class OpenedModel:
    """A model and how it reads text."""

    name: str
    """What the page calls it."""
    model: VarifocalForCausalLM
    tokenizer: Any
    """A fast tokenizer of transformers: one that knows which characters each token covers."""


def open_model(source: str) -> OpenedModel:
    """The model of a folder, a run, a .gguf file or the hub, as `retrofit.opening` reads it."""
    model, tokenizer = open_with_tokenizer(source)
    if not tokenizer.is_fast:
        raise ValueError(
            f"the tokenizer of {source} does not say which characters a token covers; put a tokenizer.json beside it"
        )
    return OpenedModel(model_name(Path(model_source(source))), model, tokenizer)


def model_name(folder: Path) -> str:
    """The folder's name; for `.../run/model`, the run's."""
    path = folder.absolute()
    return path.parent.name if path.name == "model" else path.name
