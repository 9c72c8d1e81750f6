"""The loss over a large vocabulary, without the logits of all tokens at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from varifocal.kernels.native import library
from varifocal.kernels.steps.cross_entropy import cross_entropy_, integer_labels
from varifocal.kernels.steps.product import is_faster, multiply

IGNORED = -100
"""The label of a token that is not to be predicted."""

ROWS_AT_A_TIME = 256
"""Enough rows for a fast matrix product; their logits over 152k classes are 156 MB."""
ROWS_ON_GPU = 1024
"""The same for products in bfloat16 on a GPU, where each chunk's gradient of the weight is added to the sum by a pass
of its own: with 256 rows that pass would take longer than the products."""
CLASSES_AT_A_TIME = 4096
"""Their logits of ROWS_AT_A_TIME rows stay in the cache."""


def next_token_labels(labels: Tensor, documents: Tensor | None) -> Tensor:
    """The label of what follows each token, int64 [B, T], from the label of each token itself [B, T].

    The last token of a row has nothing to predict, nor has the last one of a document or padding.
    """
    labels = integer_labels(labels)
    following = torch.full_like(labels, IGNORED)
    following[:, :-1] = labels[:, 1:]
    if documents is not None:
        goes_on = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
        following[:, :-1] = following[:, :-1].masked_fill(~goes_on, IGNORED)
    return following


def class_labels(labels: Tensor, classes: int, *, ignored: int | None = None) -> Tensor:
    """Labels of any integer type as int64, each from 0 to classes - 1 or `ignored`; ValueError for all others."""
    labels = integer_labels(labels)
    counted = labels if ignored is None else labels[labels != ignored]
    if counted.numel():
        low, high = int(counted.min()), int(counted.max())
        if low < 0 or high >= classes:
            others = "" if ignored is None else f"{ignored} or "
            raise ValueError(f"labels must be {others}between 0 and {classes - 1}, got {low} to {high}")
    return labels


@torch.compiler.disable  # type: ignore[untyped-decorator]
def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The summed cross entropy, in float32, of the logits hidden . weight^T against the labels that are not IGNORED.

    The gradients are formed together with the loss, so backward can run once only.

    Args:
        hidden: [N, C].
        weight: [V, C].
        labels: integers [N], 0..V-1 or IGNORED.
    """
    labels = class_labels(labels, len(weight), ignored=IGNORED)
    counted = labels != IGNORED
    # Rows without a label would cost a product with the whole vocabulary for nothing.
    if not bool(counted.all()):
        hidden, labels = hidden[counted], labels[counted]
    return _LinearCrossEntropy.apply(hidden, weight, labels)  # type: ignore[no-any-return, no-untyped-call]


def losses_and_shares(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each row and its share, float32 [N]; float32 logits [N, V] become e, whose softmax is share * e."""
    if logits.device.type == "cpu" and library.why_missing() is None:
        return cross_entropy_(logits, labels)
    highest = logits.amax(dim=-1, keepdim=True)
    losses = highest - logits.gather(1, labels[:, None])
    total = logits.sub_(highest).exp_().sum(dim=-1, keepdim=True)
    losses += total.log()
    return losses[:, 0], 1 / total[:, 0]


def logits_of_rows(rows: Tensor, weight: Tensor, *, room: Tensor) -> Tensor:
    """rows weight^T [R, V] for rows [R, C] and weight [V, C]; `room` [R, V] may take them."""
    if not is_faster(rows, weight):
        return torch.mm(rows, weight.mT, out=room)
    if len(weight) <= CLASSES_AT_A_TIME:
        return multiply(rows, weight)
    # oneDNN makes new tensors: for all classes at once each would be fresh memory, which costs more than the copy.
    for begin in range(0, len(weight), CLASSES_AT_A_TIME):
        part = slice(begin, begin + CLASSES_AT_A_TIME)
        room[:, part] = multiply(rows, weight[part])
    return room


def type_of_products(hidden: Tensor) -> torch.dtype:
    """The type in which the head multiplies: bfloat16 under autocast of that type, else the type of the states.

    Not float16: the sum of a row's exponentials does not fit in it.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16:
        return torch.bfloat16 if hidden.dtype == torch.float32 else hidden.dtype
    return hidden.dtype


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a b in float32 for narrow a [M, K] and b [K, N]; on a GPU its sums are never rounded."""
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b).float()


class _LinearCrossEntropy(torch.autograd.Function):
    """Walks over the rows: while the logits of some exist, it takes from them all that is ever needed.

    The gradient of a row's logits is share * e - 1[label]. Written out, that would be one more pass over the logits;
    share and label go into the small sides of the products instead:

        dh = share (e W) - W[label]          dW = e^T (share h), less h at the row of each label

    In bfloat16 a label that is nearly certain would be lost so, as the difference of two rounded numbers. There e at
    the label, one number of a row, becomes e - 1 / share before it is rounded:

        dh = share (e W)                     dW = e^T (share h)
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        want_hidden, want_weight, _ = ctx.needs_input_grad
        found = (
            torch.empty_like(hidden) if want_hidden else None,
            torch.zeros_like(weight, dtype=torch.float32) if want_weight else None,
        )
        walk = narrow_walk if type_of_products(hidden) == torch.bfloat16 else walk_of_one_type
        with torch.autocast(hidden.device.type, enabled=False):
            loss = walk(hidden, weight, labels, *found)
        ctx.gradients, ctx.weight_dtype = found, weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError("the loss cannot be differentiated twice; take the cross entropy of the logits yourself")
        # In place and given away: a second copy of the weight's gradient is as large as the weight.
        if ctx.gradients is None:
            raise RuntimeError("the loss was differentiated already; its gradients were given away, compute it again")
        (hidden, weight), ctx.gradients = ctx.gradients, None
        return (
            None if hidden is None else hidden.mul_(gradient),
            None if weight is None else weight.mul_(gradient).to(ctx.weight_dtype),
            None,
        )


def walk_of_one_type(
    hidden: Tensor, weight: Tensor, labels: Tensor, grad_hidden: Tensor | None, grad_weight: Tensor | None
) -> Tensor:
    """The summed loss, with products in the type of the states; the gradients are written to where they are wanted."""
    loss = hidden.new_zeros((), dtype=torch.float32)
    product = hidden.new_empty(min(ROWS_AT_A_TIME, len(hidden)), len(weight))
    for begin in range(0, len(hidden), ROWS_AT_A_TIME):
        part = slice(begin, begin + ROWS_AT_A_TIME)
        rows = hidden[part]
        logits = logits_of_rows(rows, weight, room=product[: len(rows)]).float()
        losses, shares = losses_and_shares(logits, labels[part])
        loss += losses.sum()
        exponentials, shares = logits.to(hidden.dtype), shares[:, None]
        if grad_hidden is not None:
            pulled = (
                multiply(exponentials, weight.mT)
                if is_faster(rows, weight)
                else torch.mm(exponentials, weight, out=grad_hidden[part])
            )
            torch.sub(pulled.mul_(shares), weight[labels[part]], out=grad_hidden[part])
        if grad_weight is not None:
            scaled = (rows * shares).to(rows.dtype)
            # The sum over chunks is float32, since 16 bits would lose too much; addmm_ wants one type.
            if grad_weight.dtype == rows.dtype:
                grad_weight.addmm_(exponentials.mT, scaled)
            else:
                grad_weight += exponentials.mT @ scaled
            grad_weight.index_add_(0, labels[part], rows.to(grad_weight.dtype), alpha=-1)
    return loss


def narrow_walk(
    hidden: Tensor, weight: Tensor, labels: Tensor, grad_hidden: Tensor | None, grad_weight: Tensor | None
) -> Tensor:
    """The same with products in bfloat16; exponentials and all sums are float32."""
    loss = hidden.new_zeros((), dtype=torch.float32)
    narrow = weight.to(torch.bfloat16)
    at_once = ROWS_ON_GPU if hidden.device.type == "cuda" else ROWS_AT_A_TIME
    for begin in range(0, len(hidden), at_once):
        part = slice(begin, begin + at_once)
        rows, wanted = hidden[part], labels[part][:, None]
        logits = wide_product(rows.to(torch.bfloat16), narrow.mT)
        losses, shares = losses_and_shares(logits, labels[part])
        loss += losses.sum()
        shares = shares[:, None]
        exponentials = logits.scatter_add_(1, wanted, -1 / shares).to(torch.bfloat16)
        if grad_hidden is not None:
            grad_hidden[part] = wide_product(exponentials, narrow).mul_(shares)
        if grad_weight is not None:
            grad_weight += wide_product(exponentials.mT, (rows * shares).to(torch.bfloat16))
    return loss
