"""One fact, told far back in a text and asked for at its end: what a model answers, and the cache it holds for that."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch

from varifocal.model.modeling import VarifocalForCausalLM
from varifocal.results.focus import FocusQuestion, SaidAnswer
from varifocal.retrofit.focus.texts import MEASURED, PLACES, Library

FACTS = 4
"""Facts of the same form in the text; only one is asked for."""
DEPTH = 0.02
"""Where that one stands: near the beginning."""


def ask_far_back(
    models: Mapping[str, VarifocalForCausalLM], library: Library, *, length: int = 1600, seed: int = 0
) -> FocusQuestion:
    """The same question put to several models, each continuing the text by its likeliest tokens.

    Args:
        models: by name.
        library: what the text is taken from.
        length: its tokens, with question and answer.
        seed: of text and facts.
    """
    draw = random.Random(seed)
    names = draw.sample(PLACES, FACTS)
    depths = [DEPTH, *(0.2 + 0.7 * draw.random() for _ in names[1:])]
    row = library.with_facts(
        length, draw, names=names, wording=MEASURED, depths=depths, only=names[0], digits=7
    )  # fmt: skip
    (answer,) = row.answers
    prompt, wanted = row.tokens[: answer.start], row.tokens[answer]
    tokenizer = library.tokenizer
    code = str(tokenizer.decode(wanted)).strip()
    said = []
    for name, model in models.items():
        given = model.generate(
            prompt[None], attention_mask=torch.ones_like(prompt)[None], max_new_tokens=len(wanted), do_sample=False,
            pad_token_id=0, return_dict_in_generate=True,
        )  # fmt: skip
        words = str(tokenizer.decode(given.sequences[0, len(prompt) :])).strip()
        said.append(SaidAnswer(name=name, said=words, right=words == code, cache_bytes=bytes_of(given.past_key_values)))
    told = MEASURED.told.format(name=names[0], code=code).strip()
    asked = MEASURED.asked.format(name=names[0]).strip()
    return FocusQuestion(
        told=told, asked=asked, answer=code, tokens=len(prompt), back=len(prompt) - place_of(library, row.tokens, told),
        answers=tuple(said),
    )  # fmt: skip


def place_of(library: Library, tokens: torch.Tensor, told: str) -> int:
    """Where the tokens of a sentence end in a text."""
    sentence = library.encode(f"\n{told}\n")
    row = tokens.tolist()
    for first in range(len(row) - len(sentence) + 1):
        if row[first : first + len(sentence)] == sentence:
            return first + len(sentence)
    raise AssertionError("the sentence stands in the text")


def bytes_of(cache: Any) -> int:
    """What the layers of a cache hold."""
    return sum(int(layer.bytes) for layer in cache.layers)
