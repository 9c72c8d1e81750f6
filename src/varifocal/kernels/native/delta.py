"""delta = dO . O: all that a backward needs to know of outputs.

Once it is known the outputs can go, before gradients of their size are allocated.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import abi, library
from .arguments import contiguous, dtype_argument, pointer, rows_contiguous, tensor_argument
from .operator import Operator


class DeltaInputs(NamedTuple):
    """The inputs of the operator."""

    grad_out: Tensor
    out: Tensor
    position: Tensor
    start: Tensor


class DeltaOutputs(NamedTuple):
    """The output of the operator."""

    delta: Tensor


def _kernel(given: DeltaInputs) -> DeltaOutputs:
    grad_out, out = rows_contiguous(given.grad_out), rows_contiguous(given.out)
    position, start = contiguous(given.position), contiguous(given.start)
    made = _fake(given)
    call = abi.Delta(
        batch=out.shape[0],
        heads=out.shape[1],
        queries=out.shape[2],
        head_width=out.shape[3],
        dtype=dtype_argument(out),
        threads=torch.get_num_threads(),
        grad_out=tensor_argument(grad_out),
        out=tensor_argument(out),
        position=pointer(position),
        start=pointer(start),
        delta=pointer(made.delta),
    )
    library.call("find_delta", call)
    return made


def _fake(given: DeltaInputs) -> DeltaOutputs:
    return DeltaOutputs(given.out.new_empty(given.out.shape[:3], dtype=torch.float32))


find_delta = Operator("delta", DeltaInputs, DeltaOutputs, _kernel, fake=_fake)


def delta_of(grad_out: Tensor, out: Tensor, position: Tensor, start: Tensor) -> Tensor:
    """dO . O [B, H, T] float32 of grad_out and out [B, H, T, D]; 0 for a query that sees nothing (start > position)."""
    return find_delta(DeltaInputs(grad_out, out, position, start)).delta
