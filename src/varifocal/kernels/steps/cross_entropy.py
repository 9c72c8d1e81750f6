"""The cross entropy of rows of logits, and their softmax but for a factor, in two passes over memory."""

import torch
from torch import Tensor

from varifocal.kernels.native import abi, library
from varifocal.kernels.native.arguments import pointer


def cross_entropy_(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each row and its share 1 / sum(e), float32 [N], for labels int64 [N].

    Contiguous float32 logits [N, V] become e = exp(logits - the row's largest); their softmax is share * e.
    """
    labels, losses, shares = labels.contiguous(), logits.new_empty(len(logits)), logits.new_empty(len(logits))
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
