"""A model and a tokenizer of bytes, for clients that start from text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.model.models import small_model
from varifocal.data.tokenizers import find_tokenizer
from varifocal.model import VarifocalForCausalLM
from varifocal.model.text import load_text_tokenizer


def text_tokenizer(folder: Path) -> Any:
    """Bytes as tokens, with an end and padding; a bare tokenizer.json names neither."""
    (folder / "tokenizer.json").write_text(find_tokenizer("bytes").raw.to_str())
    tokenizer: Any = load_text_tokenizer(folder)
    tokenizer.eos_token, tokenizer.pad_token = tokenizer.convert_ids_to_tokens([256, 257])
    return tokenizer


def text_model(variant: str) -> VarifocalForCausalLM:
    """A small model with room for bytes."""
    return small_model(variant, vocab_size=300, max_position_embeddings=128)


def saved(folder: Path, variant: str) -> Path:
    """A folder with a model and its tokenizer."""
    folder.mkdir()
    text_model(variant).save_pretrained(folder)
    text_tokenizer(folder).save_pretrained(folder)
    return folder
