"""Products of weights with a few vectors, at the speed at which memory gives the weights."""

import torch
from torch import Tensor

from varifocal.kernels.native import abi, library
from varifocal.kernels.native.arguments import pointer

MOST = abi.MOST_FEW
"""Vectors of a call."""
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""`vf_dtype` of weights."""


def matrix_argument(weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None) -> abi.Matrix:
    """Weights [N, C] for a C call, contiguous; the caller keeps them alive until the call is over.

    Args:
        weight: float32, bfloat16, or int8 with `scales`.
        bias: float32 [N], or None.
        scales: float32 [N, C / group], of int8 weights.
    """
    rows, columns = weight.shape
    return abi.Matrix(
        data=pointer(weight),
        scales=pointer(scales),
        bias=pointer(bias),
        rows=rows,
        columns=columns,
        kind=KINDS[weight.dtype],
        group=0 if scales is None else columns // scales.shape[1],
    )


def linear_of_few(x: Tensor, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None) -> Tensor:
    """weight x + bias [R, N] for 1 to 16 vectors x [R, C], both float32; weights as in `matrix_argument`.

    The same numbers on any number of threads. No gradient.
    """
    x, weight = x.contiguous(), weight.contiguous()
    out = x.new_empty(x.shape[0], weight.shape[0])
    call = abi.Linear(
        matrix=matrix_argument(weight, bias, scales),
        vectors=x.shape[0],
        threads=torch.get_num_threads(),
        x=pointer(x),
        out=pointer(out),
    )
    library.call("linear_of_few", call)
    return out
