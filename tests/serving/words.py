"""A tokenizer of a few hundred words with a chat template, for models that are served to clients who write text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
ROLES = ("system", "user", "assistant")


def save_words(folder: Path, vocabulary: int) -> Any:
    """Write a tokenizer of as many words, each a token, into the folder of a model."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[UNK]", *ROLES]
    words += [f"w{number}" for number in range(vocabulary - len(words))]
    kept = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, "[UNK]"))
    kept.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=kept, unk_token="[UNK]")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer
