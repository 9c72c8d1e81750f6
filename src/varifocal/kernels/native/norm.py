"""Root-mean-square norms, with a rotation by halves after them or without, in one pass."""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import library
from .arguments import pointer

PARTS = 64
"""Rows in which the weight's gradient is summed up, whatever the number of threads."""


class _Call(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("tokens", "heads", "width", "angles")],
        ("threads", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
        *[(name, ctypes.c_void_p) for name in ("x", "weight", "cosines", "sines", "out")],
    ]


class _GradCall(ctypes.Structure):
    _fields_ = [
        ("forward", _Call),
        ("parts", ctypes.c_int64),
        *[(name, ctypes.c_void_p) for name in ("grad_out", "grad_x", "grad_weight")],
    ]


def norm(
    x: Tensor, weight: Tensor, epsilon: float, *, cosines: Tensor | None = None, sines: Tensor | None = None
) -> Tensor:
    """weight * x / sqrt(mean(x^2) + epsilon) over the last dimension; with angles, rotated by halves after that.

    Args:
        x: float32 [B, T, C], or [B, T, H, D] to be rotated.
        weight: float32 [C] or [D].
        epsilon: added to the mean square.
        cosines, sines: float32 [B or 1, T, D], or None.
    """
    result: Tensor = _Norm.apply(x, weight, epsilon, cosines, sines)  # type: ignore[no-untyped-call]
    return result


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, epsilon: float, cosines: Tensor | None, sines: Tensor | None
    ) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        if cosines is not None and sines is not None:
            cosines, sines = cosines.contiguous(), sines.contiguous()
        ctx.save_for_backward(x, weight, cosines, sines)
        ctx.epsilon = epsilon
        out = torch.empty_like(x)
        call = _call(x, weight, epsilon, cosines, sines)
        call.out = out.data_ptr()
        library.check(library.library().vf_norm_forward(library.target(), ctypes.byref(call)), "norm")
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight, cosines, sines = ctx.saved_tensors
        grad_out, grad_x = grad_out.contiguous(), torch.empty_like(x)
        grad_weight = weight.new_empty(PARTS, len(weight))
        call = _GradCall(
            forward=_call(x, weight, ctx.epsilon, cosines, sines),
            parts=PARTS,
            grad_out=grad_out.data_ptr(),
            grad_x=grad_x.data_ptr(),
            grad_weight=grad_weight.data_ptr(),
        )
        library.check(library.library().vf_norm_backward(library.target(), ctypes.byref(call)), "norm's backward")
        return grad_x, grad_weight.sum(dim=0), None, None, None


def _call(x: Tensor, weight: Tensor, epsilon: float, cosines: Tensor | None, sines: Tensor | None) -> _Call:
    return _Call(
        tokens=x.shape[0] * x.shape[1],
        heads=x.shape[2] if x.dim() == 4 else 1,
        width=x.shape[-1],
        angles=0 if cosines is None else cosines.shape[0] * cosines.shape[1],
        threads=torch.get_num_threads(),
        epsilon=epsilon,
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        cosines=pointer(cosines),
        sines=pointer(sines),
    )
