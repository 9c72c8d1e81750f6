"""Native pair-gated attention: a small network rates every pair of query and key and gates its score.

    alpha_ij = scale_h q_i . k_j      l_ij = output_h . GELU(a_i + b_j) + bias_h      s_ij = sigmoid(l_ij)
    score = alpha s ("product"), or alpha + log s ("log", "threshold": the same without pairs of s < threshold)

over keys start_i <= j <= position_i with position_i - j < window or j - start_i < prefix. Tile by tile: nothing of the
size of all pairs exists, forward or backward.
"""

import ctypes
import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from . import library
from .arguments import TensorArgument, dtype_argument, pointer, rows_contiguous, tensor_argument

PairForm = Literal["product", "log", "threshold"]
FORMS: tuple[PairForm, ...] = ("product", "log", "threshold")
CAUSAL = 2**31 - 1
"""The window that reads every visible key."""


class PairGated(NamedTuple):
    """What `pair_gate` returns."""

    output: Tensor
    """[B, H, T, D] in q's dtype."""
    lse: Tensor
    """[B, H, T] float32: log of the sum of exp(score), -inf where nothing is read; carries no gradient."""


class _Call(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "queries", "keys", "head_width", "units")],
        *[(name, ctypes.c_int32) for name in ("dtype", "threads", "form")],
        ("threshold", ctypes.c_float),
        *[(name, ctypes.c_int32) for name in ("window", "prefix")],
        *[(name, TensorArgument) for name in ("q", "k", "v", "a", "b")],
        *[(name, ctypes.c_void_p) for name in ("output", "bias", "scale", "position", "start")],
        ("out", TensorArgument),
        *[(name, ctypes.c_void_p) for name in ("lse", "norm")],
    ]


class _GradCall(ctypes.Structure):
    _fields_ = [
        ("forward", _Call),
        *[(name, TensorArgument) for name in ("grad_out", "grad_q", "grad_k", "grad_v", "grad_a", "grad_b")],
        *[(name, ctypes.c_void_p) for name in ("grad_output", "grad_bias", "grad_scale")],
    ]


class _Inputs(NamedTuple):
    """The tensors of a call, in the memory layout the C interface asks for."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    output: Tensor
    bias: Tensor | None
    scale: Tensor
    position: Tensor
    start: Tensor

    def laid_out(self) -> "_Inputs":
        """q, k, v, a, b with contiguous rows, the others contiguous."""
        rows = (rows_contiguous(x) for x in self[:5])
        whole = (None if x is None else x.contiguous() for x in self[5:])
        return _Inputs(*rows, *whole)


def _call(
    x: _Inputs,
    *,
    form: int,
    threshold: float,
    window: int,
    prefix: int,
    out: Tensor,
    lse: Tensor,
    norm: Tensor,
) -> _Call:
    """The C arguments; the caller keeps every tensor alive until the C call is over."""
    return _Call(
        batch=x.q.shape[0],
        heads=x.q.shape[1],
        kv_heads=x.k.shape[1],
        queries=x.q.shape[2],
        keys=x.k.shape[2],
        head_width=x.q.shape[3],
        units=x.a.shape[3],
        dtype=dtype_argument(x.q),
        threads=torch.get_num_threads(),
        form=form,
        threshold=threshold,
        window=window,
        prefix=prefix,
        q=tensor_argument(x.q),
        k=tensor_argument(x.k),
        v=tensor_argument(x.v),
        a=tensor_argument(x.a),
        b=tensor_argument(x.b),
        output=x.output.data_ptr(),
        bias=pointer(x.bias),
        scale=x.scale.data_ptr(),
        position=x.position.data_ptr(),
        start=x.start.data_ptr(),
        out=tensor_argument(out),
        lse=lse.data_ptr(),
        norm=norm.data_ptr() if norm.numel() else None,
    )


@torch.library.custom_op("varifocal::pair_gate", mutates_args=(), device_types="cpu")
def _pair_gate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    output: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    position: Tensor,
    start: Tensor,
    form: int,
    threshold: float,
    window: int,
    prefix: int,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, lse, and norm for the backward ([0] unless `save`)."""
    x = _Inputs(q, k, v, a, b, output, bias, scale, position, start).laid_out()
    out, lse, norm = _empty(q, save)
    call = _call(x, form=form, threshold=threshold, window=window, prefix=prefix, out=out, lse=lse, norm=norm)
    library.check(library.library().vf_pair_gate_forward(library.target(), ctypes.byref(call)), "pair_gate")
    return out, lse, norm


def _empty(q: Tensor, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows = q.shape[:3]
    return (
        torch.empty_like(q),
        q.new_empty(rows, dtype=torch.float32),
        q.new_empty((*rows, 2) if save else (0,), dtype=torch.float32),
    )


@_pair_gate.register_fake
def _(q: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(q, others[-1])


@torch.library.custom_op("varifocal::pair_gate_backward", mutates_args=(), device_types="cpu")
def _pair_gate_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    output: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    position: Tensor,
    start: Tensor,
    out: Tensor,
    lse: Tensor,
    norm: Tensor,
    form: int,
    threshold: float,
    window: int,
    prefix: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q (float32, whatever q's dtype), k, v, a, b, output, bias and scale."""
    x = _Inputs(q, k, v, a, b, output, bias, scale, position, start).laid_out()
    grad_out = rows_contiguous(grad_out)
    grads = _empty_grads(q, k, a, b, output)
    call = _GradCall(
        forward=_call(x, form=form, threshold=threshold, window=window, prefix=prefix, out=out, lse=lse, norm=norm),
        grad_out=tensor_argument(grad_out),
        grad_q=tensor_argument(grads[0]),
        grad_k=tensor_argument(grads[1]),
        grad_v=tensor_argument(grads[2]),
        grad_a=tensor_argument(grads[3]),
        grad_b=tensor_argument(grads[4]),
        grad_output=grads[5].data_ptr(),
        grad_bias=grads[6].data_ptr(),
        grad_scale=grads[7].data_ptr(),
    )
    library.check(library.library().vf_pair_gate_backward(library.target(), ctypes.byref(call)), "pair_gate_backward")
    return grads


def _empty_grads(
    q: Tensor, k: Tensor, a: Tensor, b: Tensor, output: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(q, dtype=torch.float32),
        torch.empty_like(k),
        torch.empty_like(k),
        torch.empty_like(a),
        torch.empty_like(b),
        output.new_empty(output.shape),
        output.new_empty(output.shape[:1]),
        output.new_empty(output.shape[:1]),
    )


@_pair_gate_backward.register_fake
def _(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, output: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _empty_grads(q, k, a, b, output)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, form, threshold, window, prefix, ctx.save = inputs
    ctx.plain = (form, threshold, window, prefix)
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    if not ctx.save:
        raise RuntimeError("varifocal::pair_gate was called with save=False and cannot be differentiated")
    saved = ctx.saved_tensors
    q, bias = saved[0], saved[6]
    dq, dk, dv, da, db, doutput, dbias, dscale = _pair_gate_backward(grad_out, *saved, *ctx.plain)
    return (dq.to(q.dtype), dk, dv, da, db, doutput, None if bias is None else dbias, dscale, *(None,) * 7)


_pair_gate.register_autograd(_backward, setup_context=_setup_context)


def pair_gate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    output: Tensor,
    position: Tensor,
    start: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    form: PairForm = "product",
    threshold: float = 0.1,
    window: int = CAUSAL,
    prefix: int = 0,
) -> PairGated:
    """Pair-gated attention on the CPU; differentiable in every floating argument.

    q [B, H, T, D], k and v [B, G, S, D] of one dtype (float32 or bfloat16), H a multiple of G. a [B, H, T, P] and
    b [B, H, S, P], the halves of the hidden layer, output [H, P] and bias [H] (None: 0), taken as float32. scale [H]
    is a factor on q . k / sqrt(D) (None: 1). position and start [B, T] int32: query t may read keys
    start <= j <= position, none if start > position.
    """
    batch, heads, queries, head_width = q.shape
    _check(q, k, v, a, b, output=output, bias=bias, scale=scale)
    for name, x in (("position", position), ("start", start)):
        if x.shape != (batch, queries) or x.dtype != torch.int32:
            raise ValueError(f"{name} must be int32 [{batch}, {queries}], got {x.dtype} {[*x.shape]}")
    if form not in FORMS:
        raise ValueError(f"pair gate form must be one of {', '.join(FORMS)}, got {form!r}")
    if not 0 < threshold < 1:
        raise ValueError(f"pair gate threshold must lie between 0 and 1, got {threshold}")
    if scale is None:
        factor = torch.full((heads,), 1 / math.sqrt(head_width), dtype=torch.float32)
    else:
        factor = scale.float() / math.sqrt(head_width)
    a, b, output = a.float(), b.float(), output.float()
    bias = None if bias is None else bias.float()
    given = (q, k, v, a, b, output, bias, factor)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    out, lse, _ = _pair_gate(
        q, k, v, a, b, output, bias, factor, position, start, FORMS.index(form), threshold, window, prefix, save
    )
    return PairGated(out, lse.detach())


def _check(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, output: Tensor, bias: Tensor | None, scale: Tensor | None
) -> None:
    """ValueError for shapes, dtypes and devices that do not fit."""
    batch, heads, queries, head_width = q.shape
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != head_width:
        raise ValueError(f"q, k, v of shapes {[*q.shape]}, {[*k.shape]}, {[*v.shape]} do not fit together")
    if k.dtype != q.dtype or v.dtype != q.dtype or q.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"q, k, v must all be float32 or all bfloat16, got {q.dtype}, {k.dtype}, {v.dtype}")
    if q.device.type != "cpu":
        raise ValueError(f"native kernels run on cpu tensors, got {q.device}")
    units = a.shape[-1]
    if a.shape != (batch, heads, queries, units) or b.shape != (batch, heads, k.shape[2], units):
        raise ValueError(
            f"a must be [B, H, T, P] and b [B, H, S, P] with B, H, T, S = {batch}, {heads}, {queries}, {k.shape[2]}, "
            f"got {[*a.shape]} and {[*b.shape]}"
        )
    if output.shape != (heads, units):
        raise ValueError(f"output must be [H, P] = [{heads}, {units}], got {[*output.shape]}")
    for name, x in (("bias", bias), ("scale", scale)):
        if x is not None and x.shape != (heads,):
            raise ValueError(f"{name} must be [H] = [{heads}], got {[*x.shape]}")
