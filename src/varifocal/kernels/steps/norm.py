"""Root-mean-square norms, with a rotation by halves after them or without, in one pass."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from varifocal.kernels.native import abi, library
from varifocal.kernels.native.arguments import pointer
from varifocal.kernels.native.once import differentiable_once

PARTS = 64
"""Rows in which the weight's gradient is summed up, whatever the number of threads."""


def norm(
    x: Tensor, weight: Tensor, epsilon: float, *, cosines: Tensor | None = None, sines: Tensor | None = None
) -> Tensor:
    """weight * x / sqrt(mean(x^2) + epsilon) over the last dimension; with angles, rotated by halves after that.

    Args:
        x: float32 [B, T, C], or [B, T, H, D] to be rotated.
        weight: float32 [C] or [D].
        epsilon: added to the mean square.
        cosines, sines: float32 [B or 1, T, D], or None.

    The next step keeps the result anyway, so the backward pass restores x from it where it can. Where it cannot, with
    weights near 0 or very uneven ones, x itself is kept.
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
        out, inverse = torch.empty_like(x), x.new_empty(x.shape[:-1])
        call = _call(out, inverse, weight, epsilon, cosines, sines)
        call.x = pointer(x)
        library.call("norm_forward", call)
        ctx.epsilon = epsilon
        if any(ctx.needs_input_grad):
            ctx.restores = bool(library.library().vf_norm_restorable(ctypes.byref(call)))
            ctx.save_for_backward(out if ctx.restores else x, inverse, weight, cosines, sines)
        return out

    @staticmethod
    @differentiable_once("a native norm", instead="run the model in float64")
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        kept, inverse, weight, cosines, sines = ctx.saved_tensors
        grad_out, grad_x = grad_out.contiguous(), torch.empty_like(kept)
        grad_weight = weight.new_empty(PARTS, len(weight))
        forward = _call(kept, inverse, weight, ctx.epsilon, cosines, sines)
        if not ctx.restores:
            forward.x = pointer(kept)
        call = abi.NormGrad(
            forward=forward,
            parts=PARTS,
            grad_out=pointer(grad_out),
            grad_x=pointer(grad_x),
            grad_weight=pointer(grad_weight),
        )
        library.call("norm_backward", call)
        return grad_x, grad_weight.sum(dim=0), None, None, None


def _call(
    out: Tensor, inverse: Tensor, weight: Tensor, epsilon: float, cosines: Tensor | None, sines: Tensor | None
) -> abi.Norm:
    return abi.Norm(
        tokens=out.shape[0] * out.shape[1],
        heads=out.shape[2] if out.dim() == 4 else 1,
        width=out.shape[-1],
        angles=0 if cosines is None else cosines.shape[0] * cosines.shape[1],
        threads=torch.get_num_threads(),
        epsilon=epsilon,
        weight=pointer(weight),
        cosines=pointer(cosines),
        sines=pointer(sines),
        out=pointer(out),
        inverse=pointer(inverse),
    )
