"""Native attention over selected keys: exactly these, or whole selected blocks and the query's own block.

s_ij = scale_h q_i . k_j      p_ij = exp(s_ij) / sum_j' exp(s_ij')      o_i = w_i sum_j p_ij v_j,   j selected by i
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import abi, library
from .arguments import (
    contiguous,
    dtype_argument,
    needs_backward,
    pointer,
    put_tensor,
    require_inputs,
    require_range,
    room_like,
    rows_contiguous,
    scale_per_head,
    tensor_argument,
)
from .delta import delta_of
from .mixture import empty_gradients, scale_gradient
from .operator import Context, Gradients, Operator


class Selected(NamedTuple):
    """What `attend_selected` returns, and the outputs of the forward."""

    output: Tensor
    """[B, H, T, D] in q's dtype."""
    logsumexp: Tensor
    """[B, H, T] float32: log of the sum of exp(s), -inf where nothing is read; differentiable."""
    norm: Tensor
    """[B, H, T, 2] float32, for the backward: the largest score, in powers of 2, and 1 / the sum of 2^(s - largest).
    [0] where none follows."""


class SelectedInputs(NamedTuple):
    """The inputs of the forward."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: Tensor
    position: Tensor
    start: Tensor
    selected: Tensor
    weights: Tensor | None
    block: int
    """0 for single keys."""
    include_self: bool
    save: bool
    """Whether a backward follows."""

    def laid_out(self) -> "SelectedInputs":
        """Laid out as C takes them."""
        changed: dict[str, Any] = {}
        for name, x in zip(self._fields, self, strict=True):
            if isinstance(x, Tensor) and not x.is_contiguous():
                changed[name] = rows_contiguous(x) if name in ("q", "k", "v") else x.contiguous()
        return self._replace(**changed) if changed else self

    def call(self, logsumexp: Tensor | None, norm: Tensor) -> abi.Selected:
        """The C arguments but for the output; the caller keeps every tensor alive until the C call is over."""
        batch, heads, queries, width = self.q.shape
        _, index_heads, _, capacity = self.selected.shape
        call = abi.Selected(
            batch, heads, self.k.shape[1], index_heads, queries, self.k.shape[2], width, capacity,
            dtype=dtype_argument(self.q),
            threads=torch.get_num_threads(),
            block=self.block,
            include_self=self.include_self,
            scale=pointer(self.scale),
            position=pointer(self.position),
            start=pointer(self.start),
            selected=pointer(self.selected),
            weights=pointer(self.weights),
            logsumexp=pointer(logsumexp),
            norm=pointer(norm),
        )  # fmt: skip
        put_tensor(call, abi.Selected.q, self.q)
        put_tensor(call, abi.Selected.k, self.k)
        put_tensor(call, abi.Selected.v, self.v)
        return call


def _forward(given: SelectedInputs) -> Selected:
    inputs, made = given.laid_out(), _empty(given)
    call = inputs.call(made.logsumexp, made.norm)
    put_tensor(call, abi.Selected.out, made.output)
    library.call("attend_selected", call)
    return made


def _empty(given: SelectedInputs) -> Selected:
    rows = given.q.shape[:3]
    return Selected(
        output=room_like(given.q),
        logsumexp=given.q.new_empty(rows, dtype=torch.float32),
        norm=given.q.new_empty((*rows, 2) if given.save else (0,), dtype=torch.float32),
    )


selected_forward = Operator("attend_selected", SelectedInputs, Selected, _forward, fake=_empty)


class SelectedBackwardInputs(NamedTuple):
    """The inputs of the backward."""

    grad_out: Tensor
    delta: Tensor | None
    """Of the output; for blocks only, single keys do without."""
    grad_logsumexp: Tensor | None
    norm: Tensor
    forward: SelectedInputs


class SelectedGradients(NamedTuple):
    """Gradients of q (float32, whatever q's dtype), k, v and weights ([0] without weights)."""

    q: Tensor
    k: Tensor
    v: Tensor
    weights: Tensor


def _backward_kernel(given: SelectedBackwardInputs) -> SelectedGradients:
    forward, made = given.forward.laid_out(), _empty_gradients(given)
    grad_out, delta = rows_contiguous(given.grad_out), contiguous(given.delta)
    grad_logsumexp = contiguous(given.grad_logsumexp)
    call = abi.SelectedGrad(
        forward=forward.call(None, given.norm),
        grad_out=tensor_argument(grad_out),
        delta=pointer(delta),
        grad_logsumexp=pointer(grad_logsumexp),
        grad_q=tensor_argument(made.q),
        grad_k=tensor_argument(made.k),
        grad_v=tensor_argument(made.v),
        grad_weights=pointer(made.weights),
    )
    library.call("attend_selected_backward", call)
    return made


def _empty_gradients(given: SelectedBackwardInputs) -> SelectedGradients:
    q, k, weights = given.forward.q, given.forward.k, given.forward.weights
    of_weights = q.new_empty((0,) if weights is None else q.shape[:3], dtype=torch.float32)
    return SelectedGradients(*empty_gradients(q, k), of_weights)


selected_backward = Operator(
    "attend_selected_backward", SelectedBackwardInputs, SelectedGradients, _backward_kernel, fake=_empty_gradients
)


def _backward(ctx: Context[SelectedInputs, Selected], grads: Selected) -> Gradients:
    inputs, outputs = ctx.saved()
    if not inputs.save:
        raise RuntimeError("varifocal::attend_selected was called with save=False and cannot be differentiated")
    q, position, start, norm = inputs.q, inputs.position, inputs.start, outputs.norm
    grad_out = torch.zeros_like(q) if grads.output is None else grads.output
    delta = delta_of(grad_out, outputs.output, position, start) if inputs.block else None
    del outputs
    ctx.release()
    found = selected_backward(SelectedBackwardInputs(grad_out, delta, grads.logsumexp, norm, inputs))
    dscale = scale_gradient(found.q, q, inputs.scale, position, start) if ctx.wants("scale") else None
    dweights = found.weights if ctx.wants("weights") else None
    return {"q": found.q.to(q.dtype), "k": found.k, "v": found.v, "scale": dscale, "weights": dweights}


def _keeps(inputs: SelectedInputs, output: str) -> bool:
    """Over single keys the backward does without the output, which is then free to go."""
    return output == "norm" or (output == "output" and bool(inputs.block))


selected_forward.differentiate(_backward, without=("norm",), keeps=_keeps)
selected_forward.autocast_to_float32()


def selected_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selected: Tensor,
    *,
    position: Tensor,
    start: Tensor,
    block: int | None,
    include_self: bool,
    weights: Tensor | None,
    scale: Tensor | float | None,
) -> SelectedInputs:
    """The arguments of `attend_selected`, as its operators take them; they are known to fit together."""
    factor = scale_per_head(scale, q)
    return SelectedInputs(
        q=q,
        k=k,
        v=v,
        scale=factor,
        position=position,
        start=start,
        selected=selected,
        weights=None if weights is None else weights.float(),
        # No block is longer than the text: one that says so takes no more memory, and reads the same.
        block=min(block or 0, max(k.shape[2], 1)),
        include_self=include_self,
        save=needs_backward(q, k, v, factor, weights),
    )


def check_selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selected: Tensor,
    *,
    position: Tensor,
    start: Tensor,
    block: int | None,
    include_self: bool,
    weights: Tensor | None,
) -> None:
    """ValueError unless the arguments of `attend_selected` fit together."""
    batch, heads, queries, width = q.shape
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != width or k.shape[1] < 1 or heads % k.shape[1]:
        raise ValueError(f"q, k, v of shapes {[*q.shape]}, {[*k.shape]}, {[*v.shape]} do not fit together")
    if not torch.is_autocast_enabled("cpu"):  # then the operator sees float32, whatever comes in
        require_inputs(q=q, k=k, v=v)
    require_range(position, start, batch=batch, queries=queries)
    fits = selected.ndim == 4 and selected.shape[0] == batch and selected.shape[2] == queries and selected.shape[1] > 0
    if not fits or heads % selected.shape[1] or selected.dtype != torch.int32:
        raise ValueError(
            f"selected must be int32 [{batch}, I, {queries}, K] with I a divisor of {heads}, "
            f"got {selected.dtype} {[*selected.shape]}"
        )
    if block is not None and (block < 1 or include_self):
        raise ValueError(
            f"a block has at least 1 key and always includes the query's own, got {block=} {include_self=}"
        )
    if weights is not None and weights.shape != (batch, heads, queries):
        raise ValueError(f"weights must be [B, H, T] = {[batch, heads, queries]}, got {[*weights.shape]}")


def attend_selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selected: Tensor,
    *,
    position: Tensor,
    start: Tensor,
    block: int | None = None,
    include_self: bool = False,
    weights: Tensor | None = None,
    scale: Tensor | float | None = None,
) -> Selected:
    """Attention over selected keys on the CPU; differentiable in q, k, v, weights and scale.

    q [B, H, T, D], k and v [B, G, S, D] of one dtype (float32 or bfloat16), H a multiple of G. selected int32
    [B, I, T, K] as select_exact or (with `block`) select_blocks returns it, ascending; head h reads the selection of
    index head h // (H / I). position and start [B, T] int32. With `block` every selected block and the query's own
    up to the query are read; without it the selected keys, and the query's own if `include_self`. weights [B, H, T]
    multiply the output. scale a number or [H] (None: 1 / sqrt(D)).
    """
    check_selected(
        q, k, v, selected,
        position=position, start=start, block=block, include_self=include_self, weights=weights,
    )  # fmt: skip
    inputs = selected_inputs(
        q, k, v, selected,
        position=position, start=start, block=block, include_self=include_self, weights=weights, scale=scale,
    )  # fmt: skip
    return selected_forward(inputs)
