"""Products with weights, by the faster of the two libraries that torch brings.

Torch multiplies float32 matrices on x86 with MKL, which leaves AVX-512 alone on processors that are not Intel's.
oneDNN, which torch brings too, uses it everywhere: 2.3 times the speed on AMD's family 26.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from varifocal.kernels.native.once import differentiable_once
from varifocal.kernels.steps.swiglu import swiglu_backward, swiglu_forward

SMALLEST = 1 << 20
"""Multiplications below which a call of oneDNN, 10 microseconds, costs more than it saves."""


@functools.cache
def library() -> str:
    """The library that multiplies large float32 matrices here: the faster one, or what VARIFOCAL_PRODUCTS names."""
    forced = os.environ.get("VARIFOCAL_PRODUCTS")
    if forced in ("mkl", "onednn"):
        return forced
    if forced is not None:
        raise ValueError(f"VARIFOCAL_PRODUCTS must be mkl or onednn, got {forced!r}")
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512" and has_onednn()
    return "onednn" if wide and not made_by_intel() else "mkl"


def has_onednn() -> bool:
    """Whether this build of torch brings oneDNN."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def made_by_intel() -> bool:
    """Whether this is Intel's processor, as far as the system tells it; True where it does not."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return True


def is_faster(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` gains anything over torch's own for x [..., C] and weight [N, C]."""
    return (
        x.numel() * weight.shape[0] >= SMALLEST
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and weight.is_contiguous()
        and library() == "onednn"
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias [..., N] for x [..., C] and weight [N, C], all float32; differentiable as often as wanted."""
    rows = x.reshape(-1, x.shape[-1])
    product: Tensor = _Linear.apply(rows, weight)  # type: ignore[no-untyped-call]
    if bias is not None:
        product = product + bias
    return product.view(*x.shape[:-1], weight.shape[0])


def gated_linear(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """(silu(gate) * up) weight^T [..., N] for gate, up [..., F] and weight [N, F], all float32.

    The backward pass keeps gate and up alone, and forms their product once more.
    """
    product: Tensor = _GatedLinear.apply(  # type: ignore[no-untyped-call]
        gate.reshape(-1, gate.shape[-1]), up.reshape(-1, up.shape[-1]), weight
    )
    return product.view(*gate.shape[:-1], weight.shape[0])


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a b^T [M, N] for a [M, K] and b [N, K], without gradient; b must be contiguous, or a contiguous tensor's .mT.

    For any other b oneDNN has plain loops, a thousand times slower.
    """
    assert b.is_contiguous() or b.mT.is_contiguous()
    result: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    return result


def gradient_of_weight(grad: Tensor, x: Tensor) -> Tensor:
    """grad^T x [N, C] for grad [R, N] and x [R, C]; the longer side of the result is put where oneDNN wants it."""
    grad, x = grad.contiguous(), x.contiguous()
    return multiply(x.mT, grad.mT).mT if grad.shape[1] > x.shape[1] else multiply(grad.mT, x.mT)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return multiply(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            # A second derivative is asked for: torch's own products know theirs.
            return grad @ weight, grad.mT @ x
        wanted_x, wanted_weight = ctx.needs_input_grad
        return (
            multiply(grad, weight.mT) if wanted_x else None,
            gradient_of_weight(grad, x) if wanted_weight else None,
        )


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return multiply(swiglu_forward(gate, up), weight)

    @staticmethod
    @differentiable_once("a native SwiGLU", instead="run the model in float64")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        gate, up, weight = ctx.saved_tensors
        wanted_gate, wanted_up, wanted_weight = ctx.needs_input_grad
        of_weight = gradient_of_weight(grad, swiglu_forward(gate, up)) if wanted_weight else None
        if not (wanted_gate or wanted_up):
            return None, None, of_weight
        return *swiglu_backward(gate, up, multiply(grad, weight.mT)), of_weight
