"""SwiGLU's activation in one pass."""

from typing import Any

import torch
from torch import Tensor

from varifocal.kernels.native import abi, library
from varifocal.kernels.native.arguments import pointer
from varifocal.kernels.native.once import differentiable_once


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, all float32 of one shape."""
    result: Tensor = _Swiglu.apply(gate, up)  # type: ignore[no-untyped-call]
    return result


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, without gradient; both contiguous."""
    out = torch.empty_like(gate)
    call = _call(gate, up)
    call.out = pointer(out)
    library.call("swiglu_forward", call)
    return out


def swiglu_backward(gate: Tensor, up: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients to gate and up; gate and up are contiguous."""
    grad_out, grad_gate, grad_up = grad_out.contiguous(), torch.empty_like(gate), torch.empty_like(up)
    call = abi.SwigluGrad(
        forward=_call(gate, up),
        grad_out=pointer(grad_out),
        grad_gate=pointer(grad_gate),
        grad_up=pointer(grad_up),
    )
    library.call("swiglu_backward", call)
    return grad_gate, grad_up


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return swiglu_forward(gate, up)

    @staticmethod
    @differentiable_once("a native SwiGLU", instead="run the model in float64")
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return swiglu_backward(gate, up, grad_out)


def _call(gate: Tensor, up: Tensor) -> abi.Swiglu:
    return abi.Swiglu(elements=gate.numel(), threads=torch.get_num_threads(), gate=pointer(gate), up=pointer(up))
