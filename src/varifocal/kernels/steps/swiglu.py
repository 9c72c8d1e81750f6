"""SwiGLU's activation in one pass."""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from varifocal.kernels.native import library


class _Call(ctypes.Structure):
    _fields_ = [
        ("elements", ctypes.c_int64),
        ("threads", ctypes.c_int32),
        *[(name, ctypes.c_void_p) for name in ("gate", "up", "out")],
    ]


class _GradCall(ctypes.Structure):
    _fields_ = [("forward", _Call), *[(name, ctypes.c_void_p) for name in ("grad_out", "grad_gate", "grad_up")]]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, all float32 of one shape."""
    result: Tensor = _Swiglu.apply(gate, up)  # type: ignore[no-untyped-call]
    return result


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        call = _call(gate, up)
        call.out = out.data_ptr()
        library.check(library.library().vf_swiglu_forward(library.target(), ctypes.byref(call)), "swiglu")
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_out, grad_gate, grad_up = grad_out.contiguous(), torch.empty_like(gate), torch.empty_like(up)
        call = _GradCall(
            forward=_call(gate, up),
            grad_out=grad_out.data_ptr(),
            grad_gate=grad_gate.data_ptr(),
            grad_up=grad_up.data_ptr(),
        )
        library.check(library.library().vf_swiglu_backward(library.target(), ctypes.byref(call)), "swiglu's backward")
        return grad_gate, grad_up


def _call(gate: Tensor, up: Tensor) -> _Call:
    return _Call(elements=gate.numel(), threads=torch.get_num_threads(), gate=gate.data_ptr(), up=up.data_ptr())
