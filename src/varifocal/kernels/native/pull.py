"""How far a gradient pulls along an output, dO . O: all that a backward needs to know of outputs.

Once it is known the outputs can go, before gradients of their size are allocated.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from . import library
from .arguments import TensorArgument, dtype_argument, rows_contiguous, tensor_argument


class _Call(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("batch", "heads", "queries", "head_width")],
        *[(name, ctypes.c_int32) for name in ("dtype", "threads")],
        *[(name, TensorArgument) for name in ("grad_out", "out")],
        *[(name, ctypes.c_void_p) for name in ("position", "start", "pull")],
    ]


@torch.library.custom_op("varifocal::pull_along", mutates_args=(), device_types="cpu")
def pull_along(grad_out: Tensor, out: Tensor, position: Tensor, start: Tensor) -> Tensor:
    """dO . O [B, H, T] float32 of grad_out and out [B, H, T, D]; 0 for a query that sees nothing (start > position)."""
    grad_out, out = rows_contiguous(grad_out), rows_contiguous(out)
    position, start = position.contiguous(), start.contiguous()
    pull = out.new_empty(out.shape[:3], dtype=torch.float32)
    call = _Call(
        batch=out.shape[0],
        heads=out.shape[1],
        queries=out.shape[2],
        head_width=out.shape[3],
        dtype=dtype_argument(out),
        threads=torch.get_num_threads(),
        grad_out=tensor_argument(grad_out),
        out=tensor_argument(out),
        position=position.data_ptr(),
        start=start.data_ptr(),
        pull=pull.data_ptr(),
    )
    library.check(library.library().vf_pull_along(library.target(), ctypes.byref(call)), "pull_along")
    return pull


@pull_along.register_fake
def _(grad_out: Tensor, out: Tensor, position: Tensor, start: Tensor) -> Tensor:
    return out.new_empty(out.shape[:3], dtype=torch.float32)


def release(ctx: Any) -> None:
    """Let go of what a backward saved, unless the graph is to be kept. Compiled code frees by itself."""
    if not torch.compiler.is_compiling():
        ctx.maybe_clear_saved_tensors()
