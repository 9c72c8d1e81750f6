"""What focusing costs: the loss by position against the dense model on the same tokens, and the facts still found."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from varifocal.retrofit.focus.gates import GatedModel
from varifocal.retrofit.focus.texts import MEASURED, PLACES, FactRow, Library


class FactFound(NamedTuple):
    """A question that was asked."""

    length: int
    depth: float
    found: bool


@torch.no_grad()
def loss_by_position(gated: GatedModel, rows: Tensor, *, on_row: Callable[[], None] = lambda: None) -> Tensor:
    """[N, T - 1]: the loss in nats of every token after the first, for rows [N, T]."""
    found = []
    for row in rows:
        states = gated.hidden(row[None])[0]
        found.append(gated.token_losses(row, states))
        on_row()
    return torch.stack(found)


def questions(
    library: Library, lengths: Sequence[int], *, depths: int, repeats: int, seed: int, facts: int = 4
) -> list[FactRow]:
    """Texts with several facts, one of which is asked for; it stands at each of `depths` places in turn."""
    draw = random.Random(seed)
    found = []
    for length in lengths:
        for repeat in range(repeats):
            for number in range(depths):
                names = draw.sample(PLACES, facts)
                places = [(number + draw.random()) / depths, *(draw.random() for _ in names[1:])]
                row = library.with_facts(
                    length, random.Random(f"{seed} {length} {repeat} {number}"), names=names, wording=MEASURED,
                    depths=places, only=names[0], digits=7,
                )  # fmt: skip
                found.append(row)
    return found


@torch.no_grad()
def facts_found(
    gated: GatedModel, asked: Sequence[FactRow], *, on_row: Callable[[], None] = lambda: None
) -> list[FactFound]:
    """Whether the model would answer each question right, token by token: the answer is its own first choice."""
    found = []
    for row in asked:
        states = gated.hidden(row.tokens[None])[0]
        for answer, depth in zip(row.answers, row.depths, strict=True):
            said = gated.head()(states[answer.start - 1 : answer.stop - 1]).argmax(dim=-1)
            right = bool((said == row.tokens[answer]).all())
            found.append(FactFound(len(row.tokens), depth, right))
        on_row()
    return found
