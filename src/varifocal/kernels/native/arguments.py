"""Tensors as the C interface takes them."""

import ctypes
import functools
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import abi

Given = TypeVar("Given", Tensor, Tensor | None)


def tensor_argument(x: Tensor | None) -> abi.Tensor:
    """x [B, heads, rows, D] for a C call; the caller keeps it alive until the call is over."""
    if x is None or not x.numel():
        return abi.Tensor()
    return abi.Tensor(x.data_ptr(), abi.Strides(*x.stride()[:3]))


def put_tensor(call: ctypes.Structure, field: Any, x: Tensor) -> None:
    """x [B, heads, rows, D] in a field of a C call, such as `abi.Mixture.q`; the caller keeps it alive."""
    if x.numel():
        abi.put_tensor(call, field, x.data_ptr(), x.stride()[:3])


def pointer(x: Tensor | None) -> int | None:
    """The address of a contiguous tensor; None, which is null, for one that is not there or holds nothing."""
    return None if x is None or not x.numel() else x.data_ptr()


def row_pointer(x: Tensor, row: int) -> int | None:
    """The address of x[row] in a contiguous tensor, without the cost of making that tensor."""
    return x.data_ptr() + row * x.stride(0) * x.element_size() if x.numel() else None


def rows_contiguous(x: Given) -> Given:
    """x with a contiguous last dimension."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def room_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Room of x's shape with contiguous rows, laid out as x is: heads of a transposed q are joined without a copy."""
    made = torch.empty_like(x, dtype=dtype)
    return made if made.stride(-1) == 1 else made.new_empty(x.shape)


def contiguous(x: Given) -> Given:
    """x without gaps."""
    return None if x is None else x.contiguous()


def dtype_argument(x: Tensor) -> int:
    """`vf_dtype` of x."""
    return {torch.float32: 0, torch.bfloat16: 1}[x.dtype]


def require_range(position: Tensor, start: Tensor, *, batch: int, queries: int) -> None:
    """position and start must be int32 [B, T]."""
    for name, x in (("position", position), ("start", start)):
        if x.shape != (batch, queries) or x.dtype != torch.int32:
            raise ValueError(f"{name} must be int32 [{batch}, {queries}], got {x.dtype} {[*x.shape]}")


def require_inputs(**tensors: Tensor) -> None:
    """All tensors must lie on the CPU and be float32, or all bfloat16."""
    dtypes = {x.dtype for x in tensors.values()}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.bfloat16}:
        found = ", ".join(f"{name} {x.dtype}" for name, x in tensors.items())
        raise ValueError(f"native kernels take all float32 or all bfloat16, got {found}")
    for name, x in tensors.items():
        if x.device.type != "cpu":
            raise ValueError(f"native kernels run on cpu tensors, got {name} on {x.device}")


def scale_per_head(scale: Tensor | float | None, q: Tensor) -> Tensor:
    """float32 [H] from a number, [H], or None for 1 / sqrt(D); q [B, H, T, D]."""
    heads, width = q.shape[1], q.shape[3]
    if scale is None:
        scale = width**-0.5
    if not isinstance(scale, Tensor):
        if torch.compiler.is_compiling():
            return torch.full((heads,), scale, dtype=torch.float32)
        return one_scale(scale, heads)
    if scale.shape != (heads,):
        raise ValueError(f"scale must be a number or [H] = [{heads}], got {[*scale.shape]}")
    return scale.float()


@functools.lru_cache(maxsize=64)
def one_scale(scale: float, heads: int) -> Tensor:
    """float32 [H] with one factor in every head; made once, since every decoded token asks for it."""
    return torch.full((heads,), scale, dtype=torch.float32)


def needs_backward(*tensors: Tensor | None) -> bool:
    """Whether a gradient may be asked for any of the tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
