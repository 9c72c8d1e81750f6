"""Native mixture attention: window, causal, prefix and soft-window branches over shared scores, in one pass.

    s_ij = scale_h q_i . k_j      p_mij = omega_mij exp(s_ij) / sum_j' omega_mij' exp(s_ij')
    o_i = sum_m w_im sum_j p_mij v_j

The weight omega of branch m on a key at distance x = position_i - j is the largest of 1[x < window],
1[j - start_i < prefix] and clamp((width_i - x) / edge, 0, 1) 1[x < limit], for start_i <= j <= position_i.
"""

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import library
from .arguments import (
    TensorArgument,
    dtype_argument,
    needs_backward,
    pointer,
    require_inputs,
    require_range,
    rows_contiguous,
    scale_per_head,
    tensor_argument,
)
from .pull import pull_along, release

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
        *[(name, TensorArgument) for name in ("q", "k", "v")],
        *[(name, ctypes.c_void_p) for name in ("scale", "position", "start", "weights")],
        ("branch", _Branch * MAX_BRANCHES),
        ("out", TensorArgument),
        ("lse", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("branch_out", TensorArgument * MAX_BRANCHES),
    ]


class _GradCall(ctypes.Structure):
    _fields_ = [
        ("forward", _Call),
        ("grad_out", TensorArgument),
        *[(name, ctypes.c_void_p) for name in ("pull", "grad_lse")],
        *[(name, TensorArgument) for name in ("grad_q", "grad_k", "grad_v")],
        ("accumulate", ctypes.c_int32),
        ("grad_weights", ctypes.c_void_p),
        ("grad_width", ctypes.c_void_p * MAX_BRANCHES),
    ]


class MixtureInputs(NamedTuple):
    """The inputs of both operators; a branch's part of `width` and `edge` is 0 if it has no soft window."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: Tensor
    position: Tensor
    start: Tensor
    weights: Tensor | None
    width: Tensor | None
    """[M, B, H, T]."""
    window: Sequence[int]
    prefix: Sequence[int]
    limit: Sequence[int]
    edge: Sequence[float]
    skip_closed: bool

    def contiguous(self) -> "MixtureInputs":
        """Laid out as C takes them."""
        return self._replace(
            q=rows_contiguous(self.q),
            k=rows_contiguous(self.k),
            v=rows_contiguous(self.v),
            scale=self.scale.contiguous(),
            position=self.position.contiguous(),
            start=self.start.contiguous(),
            weights=None if self.weights is None else self.weights.contiguous(),
            width=None if self.width is None else self.width.contiguous(),
        )

    def call(self, lse: Tensor, norm: Tensor) -> _Call:
        """The C arguments but for the outputs; the caller keeps every tensor alive until the C call is over."""
        call = _Call(
            batch=self.q.shape[0],
            heads=self.q.shape[1],
            kv_heads=self.k.shape[1],
            queries=self.q.shape[2],
            keys=self.k.shape[2],
            head_width=self.q.shape[3],
            branch_count=len(self.window),
            dtype=dtype_argument(self.q),
            threads=torch.get_num_threads(),
            skip_closed=self.skip_closed,
            q=tensor_argument(self.q),
            k=tensor_argument(self.k),
            v=tensor_argument(self.v),
            scale=self.scale.data_ptr(),
            position=self.position.data_ptr(),
            start=self.start.data_ptr(),
            weights=pointer(self.weights),
            lse=lse.data_ptr(),
            norm=norm.data_ptr() if norm.numel() else None,
        )
        for m, (window, prefix, limit, edge) in enumerate(
            zip(self.window, self.prefix, self.limit, self.edge, strict=True)
        ):
            width = None if self.width is None or edge <= 0 else self.width[m].data_ptr()
            call.branch[m] = _Branch(window, prefix, limit, edge, width)
        return call


@torch.library.custom_op("varifocal::mixture", mutates_args=(), device_types="cpu")
def mixture_forward(
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
    inputs = MixtureInputs(
        q, k, v, scale, position, start, weights, width, window, prefix, limit, edge, skip_closed
    ).contiguous()
    out, lse, norm, branch_out = _empty(q, len(window), save)
    call = inputs.call(lse, norm)
    call.out = tensor_argument(out)
    for m in range(branch_out.shape[0]):
        call.branch_out[m] = tensor_argument(branch_out[m])
    library.check(library.library().vf_mixture_forward(library.target(), ctypes.byref(call)), "mixture")
    return out, lse, norm, branch_out


def _empty(q: Tensor, branches: int, save: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = (*q.shape[:3], branches)
    return (
        torch.empty_like(q),  # in q's layout: heads of a transposed q can be joined without a copy
        q.new_empty(rows, dtype=torch.float32),
        q.new_empty((*rows, 2) if save else (0,), dtype=torch.float32),
        q.new_empty((branches - 1, *q.shape) if save else (0,)),
    )


@mixture_forward.register_fake
def _(q: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    window, save = others[7], others[-1]
    return _empty(q, len(window), save)


@torch.library.custom_op("varifocal::mixture_backward", mutates_args=("grad_q", "grad_k", "grad_v"), device_types="cpu")
def mixture_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    accumulate: bool,
    grad_out: Tensor,
    pull: Tensor,
    grad_lse: Tensor | None,
    lse: Tensor,
    norm: Tensor,
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
) -> tuple[Tensor, Tensor]:
    """Gradients of q (float32, whatever q's dtype), k and v, written or added; returns those of weights and width.

    pull [B, H, T, M]: of the gradient along each branch's output, and along the whole output for the last branch.
    """
    inputs = MixtureInputs(
        q, k, v, scale, position, start, weights, width, window, prefix, limit, edge, skip_closed
    ).contiguous()
    grad_out, pull = rows_contiguous(grad_out), pull.contiguous()
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    grad_weights, grad_width = _empty_grads(lse, weights, width)
    call = _GradCall(
        forward=inputs.call(lse, norm),
        grad_out=tensor_argument(grad_out),
        pull=pull.data_ptr(),
        grad_lse=pointer(grad_lse),
        grad_q=tensor_argument(grad_q),
        grad_k=tensor_argument(grad_k),
        grad_v=tensor_argument(grad_v),
        accumulate=accumulate,
        grad_weights=None if weights is None else grad_weights.data_ptr(),
    )
    if width is not None:
        for m, one in enumerate(grad_width.zero_()):
            call.grad_width[m] = one.data_ptr()
    library.check(library.library().vf_mixture_backward(library.target(), ctypes.byref(call)), "mixture_backward")
    return grad_weights, grad_width


def _empty_grads(lse: Tensor, weights: Tensor | None, width: Tensor | None) -> tuple[Tensor, Tensor]:
    """[0] for what there is none of."""
    return (
        lse.new_empty((0,) if weights is None else weights.shape),
        lse.new_empty((0,) if width is None else width.shape),
    )


@mixture_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    lse, weights, width = arguments[7], arguments[15], arguments[16]
    return _empty_grads(lse, weights, width)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *ctx.plain, ctx.save = inputs[8:]
    ctx.save_for_backward(*inputs[:8], *output)
    ctx.set_materialize_grads(False)  # the outputs kept for the backward are large, and never have gradients


def _backward(ctx, grad_out, grad_lse, *_):  # type: ignore[no-untyped-def]
    if not ctx.save:
        raise RuntimeError("varifocal::mixture was called with save=False and cannot be differentiated")
    if grad_out is None and grad_lse is None:
        return (None,) * 14
    *inputs, out, lse, norm, branch_out = ctx.saved_tensors
    q, k, _, scale, position, start, *_ = inputs
    if grad_out is None:
        grad_out = torch.zeros_like(q)
    along = [pull_along(grad_out, one, position, start) for one in (*branch_out, out)]
    # The outputs have served: without them the gradients find room where they stood.
    del out, branch_out
    release(ctx)
    grads = empty_gradients(q, k)
    dweights, dwidth = mixture_backward(
        *grads, False, grad_out, torch.stack(along, dim=-1), grad_lse, lse, norm, *inputs, *ctx.plain
    )
    dq, dk, dv = grads
    _, _, _, want_scale, _, _, want_weights, want_width, *_ = ctx.needs_input_grad
    return (
        *(dq.to(q.dtype), dk, dv, scale_gradient(dq, q, scale, position, start) if want_scale else None, None, None),
        dweights if want_weights else None,
        dwidth if want_width else None,
        *(None,) * 6,
    )


def empty_gradients(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the gradients of q (float32, whatever its dtype), k and v."""
    return torch.empty_like(q, dtype=torch.float32), torch.empty_like(k), torch.empty_like(k)


def scale_gradient(grad_q: Tensor, q: Tensor, scale: Tensor, position: Tensor, start: Tensor) -> Tensor:
    """[H]: ds_ij / dscale = s_ij / scale, so the sum over keys is q . dq / scale."""
    along: Tensor = pull_along(grad_q, q.float(), position, start)
    return along.sum((0, 2), dtype=torch.float64).float() / scale


mixture_forward.register_autograd(_backward, setup_context=_setup_context)
mixture_forward.register_autocast("cpu", torch.float32)


def mixture_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    branches: Sequence[MixtureBranch],
    position: Tensor,
    start: Tensor,
    weights: Tensor | None,
    scale: Tensor | float | None,
) -> MixtureInputs:
    """The arguments of `mixture`, checked, as its operators take them."""
    batch, heads, queries, head_width = q.shape
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != head_width:
        raise ValueError(f"q, k, v of shapes {[*q.shape]}, {[*k.shape]}, {[*v.shape]} do not fit together")
    if not torch.is_autocast_enabled("cpu"):  # then the operator sees float32, whatever comes in
        require_inputs(q=q, k=k, v=v)
    require_range(position, start, batch=batch, queries=queries)
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
    widths = [branch.width for branch in branches]
    width = None
    if any(one is not None for one in widths):
        width = torch.stack([q.new_zeros(rows, dtype=torch.float32) if z is None else z.float() for z in widths])
    return MixtureInputs(
        q=q,
        k=k,
        v=v,
        scale=scale_per_head(scale, q),
        position=position,
        start=start,
        weights=None if weights is None else weights.float(),
        width=width,
        window=[branch.window for branch in branches],
        prefix=[branch.prefix for branch in branches],
        limit=[branch.limit for branch in branches],
        edge=[0.0 if branch.width is None else branch.edge for branch in branches],
        skip_closed=weights is not None and not (torch.is_grad_enabled() and weights.requires_grad),
    )


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
    inputs = mixture_inputs(q, k, v, branches=branches, position=position, start=start, weights=weights, scale=scale)
    out, lse, _, _ = mixture_forward(*inputs, needs_backward(*inputs[:8]))
    return Mixture(out, lse)
