"""What the model's head makes of hidden states: the loss of labels, in one kernel where the head is a plain product."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from varifocal.kernels.steps.few_rows import linear_of_few
from varifocal.model.bare import is_bare
from varifocal.model.decoding import MOST_TOKENS
from varifocal.model.loss import IGNORED, ROWS_AT_A_TIME, class_labels, linear_cross_entropy
from varifocal.model.steps import projected, runs_natively


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
    if is_bare(head, nn.Linear) and head.bias is None and on_one_device(hidden, head.weight):
        return linear_cross_entropy(hidden, head.weight, labels)
    counted = labels != IGNORED
    hidden, labels = hidden[counted], labels[counted]

    def summed(hidden: Tensor, labels: Tensor) -> Tensor:
        logits = head(hidden).float()
        classes = class_labels(labels, logits.shape[-1], ignored=IGNORED).to(logits.device)
        return functional.cross_entropy(logits, classes, reduction="sum")

    loss = hidden.new_zeros((), dtype=torch.float32)
    for begin in range(0, len(hidden), ROWS_AT_A_TIME):
        part = slice(begin, begin + ROWS_AT_A_TIME)
        loss = loss + checkpoint(summed, hidden[part], labels[part], use_reentrant=False).to(loss.device)
    return loss


def logits_of(head: nn.Module, hidden: Tensor) -> Tensor:
    """head(hidden) [..., V] for hidden [..., C]; for a few rows at the speed at which memory gives the weights."""
    # Nobody looks at sizes while compiling: the program would serve these alone.
    rows = 0 if torch.compiler.is_compiling() else hidden.numel() // max(hidden.shape[-1], 1)
    if (
        0 < rows <= MOST_TOKENS
        and not torch.is_grad_enabled()
        and is_bare(head, nn.Linear)
        and type(hidden) is Tensor
        and runs_natively(hidden, head.weight)  # type: ignore[arg-type]
    ):
        found = linear_of_few(hidden.reshape(rows, -1), head.weight, head.bias)  # type: ignore[arg-type]
        return found.view(*hidden.shape[:-1], -1)
    return projected(head, hidden)


def on_one_device(*tensors: Tensor) -> bool:
    """Whether all tensors lie in one place; weights that are offloaded come only when their module is called."""
    return len({one.device for one in tensors}) == 1


@torch.no_grad()
def token_losses(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy of each row, float32 [N], without gradient; head from [N, C] to [N, V], labels integers [N]."""
    losses = hidden.new_empty(len(hidden), dtype=torch.float32)
    for begin in range(0, len(hidden), ROWS_AT_A_TIME):
        part = slice(begin, begin + ROWS_AT_A_TIME)
        logits = projected(head, hidden[part]).float()
        classes = class_labels(labels[part], logits.shape[-1])
        losses[part] = functional.cross_entropy(logits, classes, reduction="none")
    return losses


def kept_tokens(hidden: Tensor, kept: int | Tensor) -> Tensor:
    """The hidden states [B, T, C] whose logits are wanted, as transformers says it.

    Args:
        hidden: of all tokens.
        kept: the last so many tokens (0 for all), positions [N] of every row, positions [B, N], or a bool mask [B, T].
    """
    if isinstance(kept, int):
        return hidden[:, -kept:] if kept else hidden
    if kept.ndim < 2:
        return hidden[:, kept]
    if kept.dtype == torch.bool:
        return hidden[kept]
    return torch.take_along_dim(hidden, kept[..., None], dim=1)
