"""The loss over a large vocabulary, without the logits of all tokens at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORED = -100
"""The label of a token that is not to be predicted."""

ROWS_AT_A_TIME = 256
"""Enough rows for a fast matrix product; their logits over 152k classes are 156 MB."""


def next_token_labels(labels: Tensor, documents: Tensor | None) -> Tensor:
    """The label of what follows each token [B, T], from the label of each token itself [B, T].

    The last token of a row has nothing to predict, nor has the last one of a document or padding.
    """
    following = torch.full_like(labels, IGNORED)
    following[:, :-1] = labels[:, 1:]
    if documents is not None:
        goes_on = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
        following[:, :-1] = following[:, :-1].masked_fill(~goes_on, IGNORED)
    return following


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The summed cross entropy, in float32, of the logits hidden . weight^T against the labels that are not IGNORED.

    Args:
        hidden: [N, C].
        weight: [V, C].
        labels: int64 [N], 0..V-1 or IGNORED.
    """
    counted = labels != IGNORED
    if not bool(counted.all()):
        hidden, labels = hidden[counted], labels[counted]
    return _LinearCrossEntropy.apply(hidden, weight, labels)  # type: ignore[no-any-return, no-untyped-call]


class _LinearCrossEntropy(torch.autograd.Function):
    """Forms the gradients in the forward pass, while the logits of some rows exist; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        ctx.dtypes = hidden.dtype, weight.dtype
        want_hidden, want_weight, _ = ctx.needs_input_grad
        loss = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if want_weight else None
        for begin in range(0, len(hidden), ROWS_AT_A_TIME):
            part = slice(begin, begin + ROWS_AT_A_TIME)
            rows, targets = hidden[part], labels[part, None]
            logits = (rows @ weight.mT).float()
            highest = logits.amax(dim=-1, keepdim=True)
            loss += (highest - logits.gather(1, targets)).sum()
            total = logits.sub_(highest).exp_().sum(dim=-1, keepdim=True)
            loss += total.log().sum()
            if not want_hidden and not want_weight:
                continue
            gradient = logits.div_(total)  # softmax, and less 1 at the target
            gradient.scatter_add_(1, targets, torch.full_like(total, -1.0))
            gradient = gradient.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = gradient @ weight
            if grad_weight is not None:
                grad_weight += (gradient.mT @ rows).float()
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        return (
            None if hidden is None else (hidden * gradient).to(hidden_dtype),
            None if weight is None else (weight * gradient).to(weight_dtype),
            None,
        )
