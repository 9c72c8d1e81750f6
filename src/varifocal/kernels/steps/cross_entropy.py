"""The cross entropy of rows of logits, and their softmax but for a factor, in two passes over memory."""

import torch
from torch import Tensor

from varifocal.kernels.native import abi, library
from varifocal.kernels.native.arguments import pointer


def integer_labels(labels: Tensor) -> Tensor:
    """Labels of any integer type as int64; ValueError for all others."""
    if labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex():
        raise ValueError(f"labels must be integers, got {labels.dtype}; convert them with labels.long()")
    return labels.to(torch.int64)


def cross_entropy_(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each row and its share 1 / sum(e), float32 [N], for labels [N] from 0 to V - 1.

    Contiguous float32 logits [N, V] become e = exp(logits - the row's largest); their softmax is share * e.
    """
    if labels.shape != logits.shape[:1]:
        raise ValueError(f"labels must be [N] = {(len(logits),)}, one for each row, got shape {tuple(labels.shape)}")
    # The kernel reads 64 bits for each label; that they name a class, it checks itself.
    labels = integer_labels(labels).contiguous()
    losses, shares = logits.new_empty(len(logits)), logits.new_empty(len(logits))
    call = abi.CrossEntropy(
        rows=logits.shape[0],
        classes=logits.shape[1],
        threads=torch.get_num_threads(),
        logits=pointer(logits),
        labels=pointer(labels),
        losses=pointer(losses),
        shares=pointer(shares),
    )
    library.call("cross_entropy_of_rows", call)
    return losses, shares
