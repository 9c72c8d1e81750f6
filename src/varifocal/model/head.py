"""What the model's head makes of hidden states: the loss of labels, in one kernel where the head is a plain product."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from varifocal.model.bare import is_bare
from varifocal.model.loss import IGNORED, ROWS_AT_A_TIME, check_labels, linear_cross_entropy


@torch.compiler.disable  # type: ignore[untyped-decorator]
def head_cross_entropy(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    """The summed cross entropy, in float32, of the logits head(hidden) against the labels that are not IGNORED.

    A head with an adapter, a hook or quantized weights is called, some rows at a time; each call is repeated in the
    backward pass, since the logits of all rows are larger than the model.

    Args:
        head: from [N, C] to [N, V].
        hidden: [N, C].
        labels: int64 [N], 0..V-1 or IGNORED.
    """
    if is_bare(head, nn.Linear) and head.bias is None and on_one_device(hidden, head.weight):  # type: ignore[arg-type]
        return linear_cross_entropy(hidden, head.weight, labels)  # type: ignore[arg-type, no-any-return]
    counted = labels != IGNORED
    hidden, labels = hidden[counted], labels[counted]

    def summed(hidden: Tensor, labels: Tensor) -> Tensor:
        logits = head(hidden).float()
        check_labels(labels, logits.shape[-1])
        return functional.cross_entropy(logits, labels.to(logits.device), reduction="sum")

    loss = hidden.new_zeros((), dtype=torch.float32)
    for begin in range(0, len(hidden), ROWS_AT_A_TIME):
        part = slice(begin, begin + ROWS_AT_A_TIME)
        loss = loss + checkpoint(summed, hidden[part], labels[part], use_reentrant=False).to(loss.device)
    return loss


def on_one_device(*tensors: Tensor) -> bool:
    """Whether all tensors lie in one place; weights that are offloaded come only when their module is called."""
    return len({one.device for one in tensors}) == 1


@torch.no_grad()
def token_losses(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy of each row, float32 [N], without gradient; head from [N, C] to [N, V], labels int64 [N]."""
    losses = hidden.new_empty(len(hidden), dtype=torch.float32)
    for begin in range(0, len(hidden), ROWS_AT_A_TIME):
        part = slice(begin, begin + ROWS_AT_A_TIME)
        losses[part] = functional.cross_entropy(head(hidden[part]).float(), labels[part], reduction="none")
    return losses
