"""What int8 weights cost on real text: the loss of each document before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from varifocal.data.documents import read_documents
from varifocal.model import VarifocalForCausalLM
from varifocal.results.decode_bench import LossOfWeights
from varifocal.statistics.estimates import estimate, paired_difference

FEWEST = 64
"""Tokens of a document that is counted."""


def loss_of_weights(
    plain: VarifocalForCausalLM,
    narrow: VarifocalForCausalLM,
    tokenizer: Any,
    file: Path,
    *,
    documents: int,
    length: int,
    say: Callable[[str], None],
) -> LossOfWeights:
    """The loss of both models on the beginnings of documents, and the mean of the differences with its interval.

    Args:
        plain, narrow: the same model with its weights as saved, and held narrowly.
        tokenizer: of both.
        file: .parquet with a column `text`, a document each; or a text, which is cut into pieces.
        documents: how many, the first ones of at least 64 tokens.
        length: tokens of each, at most.
        say: called before each document.
    """
    before, after, tokens = [], [], 0
    for number, ids in enumerate(beginnings(file, tokenizer, length=length)):
        if number == documents:
            break
        say(f"loss on document {number + 1} of {documents}")
        losses = [mean_loss(model, ids) for model in (plain, narrow)]
        before.append(losses[0])
        after.append(losses[1])
        tokens += ids.shape[1] - 1
    if len(before) < 2:
        raise ValueError(f"{file} holds {len(before)} documents of {FEWEST} tokens or more, and an interval needs 2")
    return LossOfWeights(
        weights="int8",
        text=file.name,
        tokens=tokens,
        loss=estimate(before),
        difference=paired_difference(after, before),
    )


@torch.no_grad()
def mean_loss(model: VarifocalForCausalLM, ids: Tensor) -> float:
    """Nats a token of a text [1, T]."""
    return float(model(ids, labels=ids).loss)


def beginnings(file: Path, tokenizer: Any, *, length: int) -> Iterator[Tensor]:
    """The first tokens [1, T] of each document that is long enough."""
    for text in read_documents(str(file)):
        ids = tokenizer.encode(text)
        step = length if file.suffix != ".parquet" else max(1, len(ids))
        for begin in range(0, len(ids), step):
            piece = ids[begin : begin + length]
            if len(piece) >= FEWEST:
                yield torch.tensor([piece], dtype=torch.int64)
