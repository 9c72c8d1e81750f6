"""Small models with a tokenizer, opened as the page opens them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.model.models import small_model
from varifocal.explorer.explorer import Explorer
from varifocal.explorer.opening import OpenedModel

TEXT = "The council met in spring. The council voted for a bridge, and the bridge was built by the people of the town."
"""Longer than the windows of the small models."""
VOCABULARY = 320


@cache
def small_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and a few merges, so that every text has tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def opened_model(variant: str, *, context: int = 256, **changes: Any) -> OpenedModel:
    """A small model of one of the variants of tests.model.models."""
    model = small_model(variant, vocab_size=VOCABULARY, max_position_embeddings=context, **changes)
    return OpenedModel(variant.replace(" ", "-"), model, small_tokenizer())


def small_explorer(*variants: str, **options: Any) -> Explorer:
    return Explorer([opened_model(variant) for variant in variants], **options)


def save_model(folder: Path, variant: str = "head_gated") -> Path:
    """The same, saved as a run leaves it."""
    opened = opened_model(variant)
    opened.model.save_pretrained(folder)
    opened.tokenizer.save_pretrained(folder)
    return folder
