"""Native mixture attention: window, causal, prefix and soft-window branches over shared scores, in one pass.

    s_ij = scale_h q_i . k_j      p_mij = omega_mij exp(s_ij) / sum_j' omega_mij' exp(s_ij')
    o_i = sum_m w_im sum_j p_mij v_j

The weight omega of branch m on a key at distance x = position_i - j is the largest of 1[x < window],
1[j - start_i < prefix] and clamp((width_i - x) / edge, 0, 1) 1[x < limit], for start_i <= j <= position_i.
"""

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import library

MAX_BRANCHES = 4
CAUSAL = 2**31 - 1
"""The window of a branch that reads every visible key."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureBranch:
    """The keys of one softmax; parts that are left at their defaults read nothing."""

    window: int = 0
    """Nearest keys, the query's own included; CAUSAL for all of them."""
    prefix: int = 0
    """First keys of the query's document."""
    width: Tensor | None = None
    """[B, H, T] float32: a learned window with a soft edge."""
    edge: float = 1.0
    limit: int = 0
    """The soft window reads no key at a distance of `limit` or more."""


class Mixture(NamedTuple):
    """What `mixture` returns."""

    output: Tensor
    """[B, H, T, D] in q's dtype."""
    lse: Tensor
    """[B, H, T, M] float32: log of the sum of omega exp(s), -inf where a branch is empty; differentiable."""


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("stride", ctypes.c_int64 * 3)]


class _Branch(ctypes.Structure):
    _fields_ = [
        ("window", ctypes.c_int32),
        ("prefix", ctypes.c_int32),
        ("limit", ctypes.c_int32),
        ("edge", ctypes.c_float),
        ("width", ctypes.c_void_p),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "queries", "keys", "head_width")],
        *[(name, ctypes.c_int32) for name in ("branch_count", "dtype", "threads", "skip_closed")],
        *[(name, _Tensor) for name in ("q", "k", "v")],
        *[(name, ctypes.c_void_p) for name in ("scale", "position", "start", "weights")],
        ("branch", _Branch * MAX_BRANCHES),
        ("out", _Tensor),
        ("lse", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("branch_out", _Tensor * MAX_BRANCHES),
    ]


class _GradCall(ctypes.Structure):
    _fields_ = [
        ("forward", _Call),
        ("grad_out", _Tensor),
        ("grad_lse", ctypes.c_void_p),
        *[(name, _Tensor) for name in ("grad_q", "grad_k", "grad_v")],
        ("grad_weights", ctypes.c_void_p),
        ("grad_width", ctypes.c_void_p * MAX_BRANCHES),
    ]


def _strided(x: Tensor) -> _Tensor:
    return _Tensor(x.data_ptr(), (ctypes.c_int64 * 3)(*x.stride()[:3]))


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: Tensor,
    position: Tensor,
    start: Tensor,
    weights: Tensor | None,
    width: Tensor | None,
    window: Sequence[int],
    prefix: Sequence[int],
    limit: Sequence[int],
    edge: Sequence[float],
    skip_closed: bool,
    out: Tensor,
    lse: Tensor,
    norm: Tensor,
    branch_out: Tensor,
) -> _Call:
    """The C arguments; the caller keeps every tensor alive until the C call is over."""
    call = _Call(
        batch=q.shape[0],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        queries=q.shape[2],
        keys=k.shape[2],
        head_width=q.shape[3],
        branch_count=len(window),
        dtype={torch.float32: 0, torch.bfloat16: 1}[q.dtype],
        threads=torch.get_num_threads(),
        skip_closed=skip_closed,
        q=_strided(q),
        k=_strided(k),
        v=_strided(v),
        scale=scale.data_ptr(),
        position=position.data_ptr(),
        start=start.data_ptr(),
        weights=None if weights is None else weights.data_ptr(),
        out=_strided(out),
        lse=lse.data_ptr(),
        norm=norm.data_ptr() if norm.numel() else None,
    )
    for m in range(len(window)):
        soft = width is not None and edge[m] > 0
        call.branch[m] = _Branch(
            window[m],
            prefix[m],
            limit[m],
            edge[m],
            width[m].data_ptr() if width is not None and soft else None,
        )
        if m < branch_out.shape[0]:
            call.branch_out[m] = _strided(branch_out[m])
    return call


@torch.library.custom_op("varifocal::mixture", mutates_args=(), device_types="cpu")
def _mixture(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: Tensor,
    position: Tensor,
    start: Tensor,
    weights: Tensor | None,
    width: Tensor | None,
    window: Sequence[int],
    prefix: Sequence[int],
    limit: Sequence[int],
    edge: Sequence[float],
    skip_closed: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, lse, and for the backward ([0] unless `save`) norm and the outputs of all branches but the last."""
    q, k, v = _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v)
    scale, position, start = scale.contiguous(), position.contiguous(), start.contiguous()
    weights = None if weights is None else weights.contiguous()
    width = None if width is None else width.contiguous()
    out, lse, norm, branch_out = _empty(q, len(window), save)
    call = _call(
        q,
        k,
        v,
        scale,
        position,
        start,
        weights,
        width,
        window,
        prefix,
        limit,
        edge,
        skip_closed,
        out,
        lse,
        norm,
        branch_out,
    )
    library.check(library.library().vf_mixture_forward(library.target(), ctypes.byref(call)), "mixture")
    return out, lse, norm, branch_out


def _empty(q: Tensor, branches: int, save: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = (*q.shape[:3], branches)
    return (
        q.new_empty(q.shape),
        q.new_empty(rows, dtype=torch.float32),
        q.new_empty((*rows, 2) if save else (0,), dtype=torch.float32),
        q.new_empty((branches - 1, *q.shape) if save else (0,)),
    )


@_mixture.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: Tensor,
    position: Tensor,
    start: Tensor,
    weights: Tensor | None,
    width: Tensor | None,
    window: Sequence[int],
    prefix: Sequence[int],
    limit: Sequence[int],
    edge: Sequence[float],
    skip_closed: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty(q, len(window), save)


@torch.library.custom_op("varifocal::mixture_backward", mutates_args=(), device_types="cpu")
def _mixture_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: Tensor,
    position: Tensor,
    start: Tensor,
    weights: Tensor | None,
    width: Tensor | None,
    out: Tensor,
    lse: Tensor,
    norm: Tensor,
    branch_out: Tensor,
    window: Sequence[int],
    prefix: Sequence[int],
    limit: Sequence[int],
    edge: Sequence[float],
    skip_closed: bool,
    want_weights: bool,
    want_width: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q (float32, whatever q's dtype), k, v, weights and width ([0] where not wanted)."""
    q, k, v, grad_out = (
        _rows_contiguous(q),
        _rows_contiguous(k),
        _rows_contiguous(v),
        _rows_contiguous(grad_out),
    )
    scale, position, start = scale.contiguous(), position.contiguous(), start.contiguous()
    weights = None if weights is None else weights.contiguous()
    width = None if width is None else width.contiguous()
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    grads = _empty_grads(q, k, lse, width, want_weights, want_width)
    forward = _call(
        q,
        k,
        v,
        scale,
        position,
        start,
        weights,
        width,
        window,
        prefix,
        limit,
        edge,
        skip_closed,
        out,
        lse,
        norm,
        branch_out,
    )
    call = _GradCall(
        forward=forward,
        grad_out=_strided(grad_out),
        grad_lse=None if grad_lse is None else grad_lse.data_ptr(),
        grad_q=_strided(grads[0]),
        grad_k=_strided(grads[1]),
        grad_v=_strided(grads[2]),
        grad_weights=grads[3].data_ptr() if want_weights else None,
    )
    if want_width:
        for m, one in enumerate(grads[4].zero_()):
            call.grad_width[m] = one.data_ptr()
    library.check(library.library().vf_mixture_backward(library.target(), ctypes.byref(call)), "mixture_backward")
    return grads


def _empty_grads(
    q: Tensor, k: Tensor, lse: Tensor, width: Tensor | None, want_weights: bool, want_width: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        q.new_empty(q.shape, dtype=torch.float32),
        k.new_empty(k.shape),
        k.new_empty(k.shape),
        lse.new_empty(lse.shape if want_weights else (0,)),
        lse.new_empty(width.shape if want_width and width is not None else (0,)),
    )


@_mixture_backward.register_fake
def _(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: Tensor,
    position: Tensor,
    start: Tensor,
    weights: Tensor | None,
    width: Tensor | None,
    out: Tensor,
    lse: Tensor,
    norm: Tensor,
    branch_out: Tensor,
    window: Sequence[int],
    prefix: Sequence[int],
    limit: Sequence[int],
    edge: Sequence[float],
    skip_closed: bool,
    want_weights: bool,
    want_width: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _empty_grads(q, k, lse, width, want_weights, want_width)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, scale, position, start, weights, width, *ctx.plain, ctx.save = inputs
    ctx.save_for_backward(q, k, v, scale, position, start, weights, width, *output)
    ctx.set_materialize_grads(False)  # the outputs kept for the backward are large, and never have gradients


def _backward(ctx, grad_out, grad_lse, *_):  # type: ignore[no-untyped-def]
    if not ctx.save:
        raise RuntimeError("varifocal::mixture was called with save=False and cannot be differentiated")
    if grad_out is None and grad_lse is None:
        return (None,) * 14
    saved = ctx.saved_tensors
    q, scale = saved[0], saved[3]
    if grad_out is None:
        grad_out = torch.zeros_like(q)
    _, _, _, want_scale, _, _, want_weights, want_width, *_ = ctx.needs_input_grad
    dq, dk, dv, dweights, dwidth = _mixture_backward(grad_out, grad_lse, *saved, *ctx.plain, want_weights, want_width)
    # ds_ij / dscale = s_ij / scale, so the sum over keys is q . dq / scale.
    dscale = torch.linalg.vecdot(q.float(), dq).sum((0, 2), dtype=torch.float64).float() / scale if want_scale else None
    return (
        *(dq.to(q.dtype), dk, dv, dscale, None, None),
        dweights if want_weights else None,
        dwidth if want_width else None,
        *(None,) * 6,
    )


_mixture.register_autograd(_backward, setup_context=_setup_context)
_mixture.register_autocast("cpu", torch.float32)


def mixture(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    branches: Sequence[MixtureBranch],
    position: Tensor,
    start: Tensor,
    weights: Tensor | None = None,
    scale: Tensor | float | None = None,
) -> Mixture:
    """Mixture attention on the CPU; differentiable in q, k, v, weights, scale and the branches' widths.

    q [B, H, T, D], k and v [B, G, S, D] of one dtype (float32 or bfloat16), H a multiple of G. position and
    start [B, T] int32: query t may read keys start <= j <= position, none if start > position. weights
    [B, H, T, M] (None: all 1), scale a number or [H] (None: 1 / sqrt(D)).
    """
    batch, heads, queries, head_width = q.shape
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != head_width:
        raise ValueError(f"q, k, v of shapes {[*q.shape]}, {[*k.shape]}, {[*v.shape]} do not fit together")
    cast = torch.is_autocast_enabled("cpu")  # then the operator sees float32, whatever comes in
    if not cast and (k.dtype != q.dtype or v.dtype != q.dtype or q.dtype not in (torch.float32, torch.bfloat16)):
        raise ValueError(f"q, k, v must all be float32 or all bfloat16, got {q.dtype}, {k.dtype}, {v.dtype}")
    if q.device.type != "cpu":
        raise ValueError(f"native kernels run on cpu tensors, got {q.device}")
    for name, x in (("position", position), ("start", start)):
        if x.shape != (batch, queries) or x.dtype != torch.int32:
            raise ValueError(f"{name} must be int32 [{batch}, {queries}], got {x.dtype} {[*x.shape]}")
    if not 1 <= len(branches) <= MAX_BRANCHES:
        raise ValueError(f"a mixture has 1 to {MAX_BRANCHES} branches, got {len(branches)}")
    rows = (batch, heads, queries)
    if weights is not None and weights.shape != (*rows, len(branches)):
        raise ValueError(f"weights must be [B, H, T, M] = {[*rows, len(branches)]}, got {[*weights.shape]}")
    for branch in branches:
        if branch.width is not None and (branch.width.shape != rows or branch.edge <= 0):
            raise ValueError(
                f"a soft window needs width [B, H, T] = {[*rows]} and edge > 0, "
                f"got {[*branch.width.shape]} and {branch.edge}"
            )
    if scale is None:
        scale = head_width**-0.5
    if not isinstance(scale, Tensor):
        scale = torch.full((heads,), scale, dtype=torch.float32)
    if scale.shape != (heads,):
        raise ValueError(f"scale must be a number or [H] = [{heads}], got {[*scale.shape]}")
    if weights is not None:
        weights = weights.float()
    widths = [branch.width for branch in branches]
    stacked = None
    if any(width is not None for width in widths):
        stacked = torch.stack([q.new_zeros(rows, dtype=torch.float32) if z is None else z.float() for z in widths])
    given = (q, k, v, scale, weights, stacked)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    out, lse, _, _ = _mixture(
        q,
        k,
        v,
        scale.float(),
        position,
        start,
        weights,
        stacked,
        [branch.window for branch in branches],
        [branch.prefix for branch in branches],
        [branch.limit for branch in branches],
        [0.0 if branch.width is None else branch.edge for branch in branches],
        weights is not None and not (torch.is_grad_enabled() and weights.requires_grad),
        save,
    )
    return Mixture(out, lse)
