"""One fact, told far back in a text and asked for at its end: what a model answers, and the cache it holds for that."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from varifocal.model.modeling import VarifocalForCausalLM
from varifocal.results.focus import FocusQuestion, SaidAnswer
from varifocal.retrofit.focus.texts import MEASURED, PLACES, Library

DEPTH = 0.02
"""Where the fact stands: near the beginning."""
MOST = 4
"""Questions that are tried before one that the first model cannot answer is shown."""


def ask_far_back(models: Mapping[str, VarifocalForCausalLM], library: Library, *, length: int = 1600) -> FocusQuestion:
    """The first of a few questions that the first model answers, put to all: the others have that answer to lose.

    Args:
        models: by name; the first is the one that others are held to.
        library: what the texts are taken from.
        length: their tokens, with question and answer.
    """
    for seed in range(MOST):
        question = ask(models, library, length=length, seed=seed)
        if question.answers[0].right:
            break
    return replace(question, tried=seed + 1)


def ask(models: Mapping[str, VarifocalForCausalLM], library: Library, *, length: int, seed: int) -> FocusQuestion:
    """One question put to several models, each continuing the text by its likeliest tokens."""
    draw = random.Random(seed)
    names = draw.sample(PLACES, 1)
    row = library.with_facts(length, draw, names=names, wording=MEASURED, depths=[DEPTH], digits=7)
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
