"""Native attention over selected keys: exactly the chosen ones, or whole chosen blocks and the query's own block.

s_ij = scale_h q_i . k_j      p_ij = exp(s_ij) / sum_j' exp(s_ij')      o_i = w_i sum_j p_ij v_j,   j in the choice of i
"""

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import library
from .arguments import (
    TensorArgument,
    dtype_argument,
    pointer,
    require_inputs,
    require_range,
    rows_contiguous,
    scale_per_head,
    tensor_argument,
)
from .mixture import empty_gradients, scale_gradient
from .pull import pull_along, release


class Selected(NamedTuple):
    """What `attend_selected` returns."""

    output: Tensor
    """[B, H, T, D] in q's dtype."""
    lse: Tensor
    """[B, H, T] float32: log of the sum of exp(s), -inf where nothing is read; differentiable."""


class _Call(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "index_heads", "queries", "keys")],
        *[(name, ctypes.c_int64) for name in ("head_width", "capacity")],
        *[(name, ctypes.c_int32) for name in ("dtype", "threads", "block", "include_self")],
        *[(name, TensorArgument) for name in ("q", "k", "v")],
        *[(name, ctypes.c_void_p) for name in ("scale", "position", "start", "chosen", "weights")],
        ("out", TensorArgument),
        ("lse", ctypes.c_void_p),
    ]


class _GradCall(ctypes.Structure):
    _fields_ = [
        ("forward", _Call),
        ("grad_out", TensorArgument),
        *[(name, ctypes.c_void_p) for name in ("pull", "grad_lse")],
        *[(name, TensorArgument) for name in ("grad_q", "grad_k", "grad_v")],
        ("grad_weights", ctypes.c_void_p),
    ]


class SelectedInputs(NamedTuple):
    """The inputs of both operators."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: Tensor
    position: Tensor
    start: Tensor
    chosen: Tensor
    weights: Tensor | None
    block: int
    """0 for single keys."""
    include_self: bool

    def contiguous(self) -> "SelectedInputs":
        """Laid out as C takes them."""
        return self._replace(
            q=rows_contiguous(self.q),
            k=rows_contiguous(self.k),
            v=rows_contiguous(self.v),
            scale=self.scale.contiguous(),
            position=self.position.contiguous(),
            start=self.start.contiguous(),
            chosen=self.chosen.contiguous(),
            weights=None if self.weights is None else self.weights.contiguous(),
        )

    def call(self, lse: Tensor) -> _Call:
        """The C arguments but for the output; the caller keeps every tensor alive until the C call is over."""
        return _Call(
            batch=self.q.shape[0],
            heads=self.q.shape[1],
            kv_heads=self.k.shape[1],
            index_heads=self.chosen.shape[1],
            queries=self.q.shape[2],
            keys=self.k.shape[2],
            head_width=self.q.shape[3],
            capacity=self.chosen.shape[3],
            dtype=dtype_argument(self.q),
            threads=torch.get_num_threads(),
            block=self.block,
            include_self=self.include_self,
            q=tensor_argument(self.q),
            k=tensor_argument(self.k),
            v=tensor_argument(self.v),
            scale=self.scale.data_ptr(),
            position=self.position.data_ptr(),
            start=self.start.data_ptr(),
            chosen=self.chosen.data_ptr(),
            weights=pointer(self.weights),
            lse=lse.data_ptr(),
        )


@torch.library.custom_op("varifocal::attend_selected", mutates_args=(), device_types="cpu")
def selected_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: Tensor,
    position: Tensor,
    start: Tensor,
    chosen: Tensor,
    weights: Tensor | None,
    block: int,
    include_self: bool,
) -> tuple[Tensor, Tensor]:
    """Output and lse."""
    inputs = SelectedInputs(q, k, v, scale, position, start, chosen, weights, block, include_self).contiguous()
    out, lse = _empty(q)
    call = inputs.call(lse)
    call.out = tensor_argument(out)
    library.check(library.library().vf_attend_chosen(library.target(), ctypes.byref(call)), "attend_selected")
    return out, lse


def _empty(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


selected_forward.register_fake(_empty)


@torch.library.custom_op("varifocal::attend_selected_backward", mutates_args=(), device_types="cpu")
def selected_backward(
    grad_out: Tensor,
    pull: Tensor | None,
    grad_lse: Tensor | None,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: Tensor,
    position: Tensor,
    start: Tensor,
    chosen: Tensor,
    weights: Tensor | None,
    block: int,
    include_self: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q (float32, whatever q's dtype), k, v and weights ([0] without weights); pull only for blocks."""
    inputs = SelectedInputs(q, k, v, scale, position, start, chosen, weights, block, include_self).contiguous()
    grad_out = rows_contiguous(grad_out)
    pull = None if pull is None else pull.contiguous()
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    grads = _empty_grads(q, k, weights)
    call = _GradCall(
        forward=inputs.call(lse),
        grad_out=tensor_argument(grad_out),
        pull=pointer(pull),
        grad_lse=pointer(grad_lse),
        grad_q=tensor_argument(grads[0]),
        grad_k=tensor_argument(grads[1]),
        grad_v=tensor_argument(grads[2]),
        grad_weights=None if weights is None else grads[3].data_ptr(),
    )
    status = library.library().vf_attend_chosen_backward(library.target(), ctypes.byref(call))
    library.check(status, "attend_selected_backward")
    return grads


def _empty_grads(q: Tensor, k: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    no_weights = q.new_empty((0,) if weights is None else q.shape[:3], dtype=torch.float32)
    return (*empty_gradients(q, k), no_weights)


@selected_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, weights = arguments[4], arguments[5], arguments[11]
    return _empty_grads(q, k, weights)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.plain = inputs[8:]
    out, lse = output
    # Over single keys the backward does without the output, which is then free to go.
    block, _ = ctx.plain
    ctx.save_for_backward(*inputs[:8], out if block else None, lse)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_lse):  # type: ignore[no-untyped-def]
    *inputs, out, lse = ctx.saved_tensors
    q, _, _, scale, position, start, _, _ = inputs
    if grad_out is None:
        grad_out = torch.zeros_like(q)
    pull = None if out is None else pull_along(grad_out, out, position, start)
    del out
    release(ctx)
    dq, dk, dv, dweights = selected_backward(grad_out, pull, grad_lse, lse, *inputs, *ctx.plain)
    want_scale, want_weights = ctx.needs_input_grad[3], ctx.needs_input_grad[7]
    dscale = scale_gradient(dq, q, scale, position, start) if want_scale else None
    return (dq.to(q.dtype), dk, dv, dscale, None, None, None, dweights if want_weights else None, None, None)


selected_forward.register_autograd(_backward, setup_context=_setup_context)
selected_forward.register_autocast("cpu", torch.float32)


def selected_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    *,
    position: Tensor,
    start: Tensor,
    block: int | None,
    include_self: bool,
    weights: Tensor | None,
    scale: Tensor | float | None,
) -> SelectedInputs:
    """The arguments of `attend_selected`, checked, as its operators take them."""
    batch, heads, queries, width = q.shape
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != width or k.shape[1] < 1 or heads % k.shape[1]:
        raise ValueError(f"q, k, v of shapes {[*q.shape]}, {[*k.shape]}, {[*v.shape]} do not fit together")
    if not torch.is_autocast_enabled("cpu"):  # then the operator sees float32, whatever comes in
        require_inputs(q=q, k=k, v=v)
    require_range(position, start, batch=batch, queries=queries)
    fits = chosen.ndim == 4 and chosen.shape[0] == batch and chosen.shape[2] == queries and chosen.shape[1] > 0
    if not fits or heads % chosen.shape[1] or chosen.dtype != torch.int32:
        raise ValueError(
            f"chosen must be int32 [{batch}, I, {queries}, K] with I a divisor of {heads}, "
            f"got {chosen.dtype} {[*chosen.shape]}"
        )
    if block is not None and (block < 1 or include_self):
        raise ValueError(
            f"a block has at least 1 key and always includes the query's own, got {block=} {include_self=}"
        )
    if weights is not None and weights.shape != (batch, heads, queries):
        raise ValueError(f"weights must be [B, H, T] = {[batch, heads, queries]}, got {[*weights.shape]}")
    return SelectedInputs(
        q=q,
        k=k,
        v=v,
        scale=scale_per_head(scale, q),
        position=position,
        start=start,
        chosen=chosen,
        weights=None if weights is None else weights.float(),
        block=block or 0,
        include_self=include_self,
    )


def attend_selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    *,
    position: Tensor,
    start: Tensor,
    block: int | None = None,
    include_self: bool = False,
    weights: Tensor | None = None,
    scale: Tensor | float | None = None,
) -> Selected:
    """Attention over selected keys on the CPU; differentiable in q, k, v, weights and scale.

    q [B, H, T, D], k and v [B, G, S, D] of one dtype (float32 or bfloat16), H a multiple of G. chosen int32
    [B, I, T, K] as select_exact or (with `block`) select_blocks returns it, ascending; head h reads the choice of
    index head h // (H / I). position and start [B, T] int32. With `block` every chosen block and the query's own
    up to the query are read; without it the chosen keys, and the query's own if `include_self`. weights [B, H, T]
    multiply the output. scale a number or [H] (None: 1 / sqrt(D)).
    """
    inputs = selected_inputs(
        q, k, v, chosen,
        position=position, start=start, block=block, include_self=include_self, weights=weights, scale=scale,
    )  # fmt: skip
    return Selected(*selected_forward(*inputs))
