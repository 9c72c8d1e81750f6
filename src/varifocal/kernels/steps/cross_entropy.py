"""The cross entropy of rows of logits, and their softmax but for a factor, in two passes over memory."""

import ctypes

import torch
from torch import Tensor

from varifocal.kernels.native import library


class _Call(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("rows", "classes")],
        ("threads", ctypes.c_int32),
        *[(name, ctypes.c_void_p) for name in ("logits", "labels", "losses", "shares")],
    ]


def cross_entropy_(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each row and its share 1 / sum(e), float32 [N], for labels int64 [N].

    Contiguous float32 logits [N, V] become e = exp(logits - the row's largest); their softmax is share * e.
    """
    labels, losses, shares = labels.contiguous(), logits.new_empty(len(logits)), logits.new_empty(len(logits))
    call = _Call(
        rows=logits.shape[0],
        classes=logits.shape[1],
        threads=torch.get_num_threads(),
        logits=logits.data_ptr(),
        labels=labels.data_ptr(),
        losses=losses.data_ptr(),
        shares=shares.data_ptr(),
    )
    library.check(library.library().vf_cross_entropy_of_rows(library.target(), ctypes.byref(call)), "cross_entropy_")
    return losses, shares
