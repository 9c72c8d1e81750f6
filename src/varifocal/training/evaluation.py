"""A model's loss on prepared data: as one number, in bits per byte, and by how much of the text lies before a token."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from varifocal.data import PackedRows, TokenSplit
from varifocal.model.head import token_losses
from varifocal.model.loss import IGNORED, next_token_labels
from varifocal.model.modeling import VarifocalForCausalLM
from varifocal.results.evaluation import CurvePoint, Evaluation
from varifocal.training.micro_batches import token_labels


@torch.no_grad()
def evaluate(
    model: VarifocalForCausalLM,
    split: TokenSplit,
    *,
    length: int,
    batch_size: int = 8,
    most_tokens: int | None = None,
    on_batch: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """The loss of a split in rows of `length` tokens, documents isolated; of a probe, the loss of its answers.

    Args:
        model: in any mode; it is put into evaluation mode and back.
        split: of a prepared data set.
        length: tokens of a row; what lies further back in a document is not seen.
        batch_size: rows at once.
        most_tokens: stop after so many tokens; None for the whole split.
        on_batch: called with rows done and rows in all.
    """
    rows = split.rows(length=length)
    count = len(rows) if most_tokens is None else min(len(rows), max(1, most_tokens // length))
    edges = curve_edges(length)
    right = 0
    sums, squares, numbers = (torch.zeros(len(edges) - 1, dtype=torch.float64) for _ in range(3))
    before = model.training
    model.eval()
    try:
        for begin in range(0, count, batch_size):
            losses, context, correct = row_losses(model, rows, list(range(begin, min(begin + batch_size, count))))
            right += correct
            # right=True puts a context of exactly an edge into the bin that begins there.
            place = torch.bucketize(context, torch.tensor(edges), right=True) - 1
            sums.scatter_add_(0, place, losses)
            squares.scatter_add_(0, place, losses**2)
            numbers.scatter_add_(0, place, torch.ones_like(losses))
            if on_batch is not None:
                on_batch(min(begin + batch_size, count), count)
    finally:
        model.train(before)
    loss = float(sums.sum() / numbers.sum())
    curve = tuple(
        CurvePoint(least=least, most=most - 1, loss=mean, spread=error, tokens=int(number))
        for least, most, total, square, number in zip(edges, edges[1:], sums, squares, numbers, strict=False)
        if number
        for mean, error in [mean_and_error(float(total), float(square), int(number))]
    )
    # Of a probe only the answers are predicted.
    share = 1.0 if split.answers is None else len(split.answers.tokens) / split.tokens
    bits = split.bits_per_byte(loss * share)
    return Evaluation(
        loss=loss,
        perplexity=math.exp(loss),
        bits_per_byte=bits,
        tokens=int(numbers.sum()),
        length=length,
        curve=curve,
        accuracy=None if split.answers is None else right / int(numbers.sum()),
    )


def row_losses(
    model: VarifocalForCausalLM, rows: PackedRows, indices: list[int]
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Loss (float64) of every predicted token of some rows, and how many tokens of its document stood before it.

    Of a probe also how many of its answers are the most probable token; 0 for text, where nobody asks.
    """
    batch = rows.batch(indices)
    ids, documents, positions = (torch.from_numpy(part).to(model.device) for part in batch[:3])
    hidden = model.model(input_ids=ids, documents=documents, position_ids=positions, use_cache=False).last_hidden_state
    # Rows cut long documents: only what stands in the row before a token can be seen.
    seen = tokens_before(documents) + 1
    labels = next_token_labels(token_labels(rows, indices, ids), documents)
    counted = labels != IGNORED
    losses = token_losses(model.lm_head, hidden[counted], labels[counted])
    right = 0
    if rows.split.answers is not None:
        right = int((model.lm_head(hidden[counted]).argmax(dim=-1) == labels[counted]).sum())
    return losses.double().cpu(), seen[counted].cpu(), right


def tokens_before(documents: torch.Tensor) -> torch.Tensor:
    """How many tokens of its own document stand before each token in its row; documents [B, T]."""
    place = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return place - torch.where(starts, place, 0).cummax(dim=1).values


def curve_edges(length: int) -> list[int]:
    """1, 2, 4, ... up to the length: the loss falls with the logarithm of the context."""
    return [*(2**power for power in range(length.bit_length()) if 2**power < length), length]


def mean_and_error(total: float, square: float, number: int) -> tuple[float, float]:
    """Mean and standard error from sums; 0 for the error of one."""
    mean = total / number
    variance = max(0.0, square / number - mean**2)
    return mean, math.sqrt(variance / max(number - 1, 1)) if number > 1 else 0.0
