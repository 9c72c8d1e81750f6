"""Native mixture attention: window, causal, prefix and soft-window branches over shared scores, in one pass.

    p_mij = omega_mij exp(s_ij) / sum_j' omega_mij' exp(s_ij')      o_i = sum_m w_im sum_j p_mij v_j

The weight omega of branch m on a key at distance x = position_i - j is the largest of 1[x < window_h],
1[j - start_i < prefix_h] and clamp((width_i - x) / edge, 0, 1) 1[x < limit], for start_i <= j <= position_i.
The score s_ij is scale_h q_i . k_j, alone or with a bias by distance added (`mixture`), or gated (pair_gate.py).
"""

import ctypes
import dataclasses
import functools
from collections.abc import Sequence
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
    row_pointer,
    rows_contiguous,
    scale_per_head,
    tensor_argument,
)
from .delta import delta_of
from .operator import Context, Gradients, Operator

MAX_BRANCHES = abi.MAX_BRANCHES
CAUSAL = 2**31 - 1
"""The window of a branch that reads every visible key."""

DOT = 0
DISTANCE_BIAS = 4
"""Numbers of scores: `vf_score`. Pair gates have 1 to 3 (pair_gate.FORMS)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureBranch:
    """The keys of one softmax; parts that are left at their defaults read nothing."""

    window: int | Tensor = 0
    """Nearest keys, the query's own included; CAUSAL for all of them. A number, or int32 [H]: one for each head."""
    prefix: int | Tensor = 0
    """First keys of the query's document. A number, or int32 [H]."""
    width: Tensor | None = None
    """[B, H, T] float32: a learned window with a soft edge."""
    edge: float = 1.0
    limit: int = 0
    """The soft window reads no key at a distance of `limit` or more."""


class Mixture(NamedTuple):
    """What `mixture` returns."""

    output: Tensor
    """[B, H, T, D] in q's dtype."""
    logsumexp: Tensor
    """[B, H, T, M] float32: log of the sum of omega exp(s), -inf where a branch is empty; differentiable."""


class MixtureInputs(NamedTuple):
    """The inputs of the forward; a branch's part of `width` and `edge` is 0 if it has no soft window."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: Tensor
    position: Tensor
    start: Tensor
    weights: Tensor | None
    width: Tensor | None
    """[M, B, H, T]."""
    window: Tensor
    """int32 [M, H]."""
    prefix: Tensor
    """int32 [M, H]."""
    limit: Sequence[int]
    edge: Sequence[float]
    skip_closed: bool
    save: bool
    """Whether a backward follows."""
    score: int = DOT
    bias_table: Tensor | None = None
    """float32 [H, N] or [B, H, T, N], of a bias by distance."""
    pair_a: Tensor | None = None
    """float32 [B, H, T, P], of a pair gate, as are all below."""
    pair_b: Tensor | None = None
    """float32 [B, H, S, P]."""
    pair_output: Tensor | None = None
    """float32 [H, P]."""
    pair_bias: Tensor | None = None
    """float32 [H]."""
    threshold: float = 0.5

    def laid_out(self) -> "MixtureInputs":
        """Laid out as C takes them."""
        rows = ("q", "k", "v", "bias_table", "pair_a", "pair_b")
        changed: dict[str, Any] = {}
        for name, x in zip(self._fields, self, strict=True):
            if isinstance(x, Tensor) and not x.is_contiguous():
                changed[name] = rows_contiguous(x) if name in rows else x.contiguous()
        return self._replace(**changed) if changed else self

    def call(self, logsumexp: Tensor, norm: Tensor) -> abi.Mixture:
        """The C arguments but for the outputs; the caller keeps every tensor alive until the C call is over."""
        batch, heads, queries, width = self.q.shape
        call = sized_call(
            batch, heads, self.k.shape[1], queries, self.k.shape[2], width,
            branch_count=len(self.limit), dtype=dtype_argument(self.q), threads=torch.get_num_threads(),
            skip_closed=self.skip_closed, score=self.score,
        )  # fmt: skip
        put_tensor(call, abi.Mixture.q, self.q)
        put_tensor(call, abi.Mixture.k, self.k)
        put_tensor(call, abi.Mixture.v, self.v)
        call.scale, call.position, call.start = pointer(self.scale), pointer(self.position), pointer(self.start)
        call.weights, call.logsumexp, call.norm = pointer(self.weights), pointer(logsumexp), pointer(norm)
        for m, (limit, edge) in enumerate(zip(self.limit, self.edge, strict=True)):
            soft = None if self.width is None or edge <= 0 else row_pointer(self.width, m)
            abi.put_branch(
                call, m, window=row_pointer(self.window, m) or 0, prefix=row_pointer(self.prefix, m) or 0,
                width=soft or 0, limit=limit, edge=edge,
            )  # fmt: skip
        if self.bias_table is not None:
            call.bias = abi.DistanceBias(self.bias_table.shape[-1], pointer(self.bias_table), _strides(self.bias_table))
        if self.pair_a is not None:
            call.pair = abi.PairGate(
                units=self.pair_a.shape[3],
                a=tensor_argument(self.pair_a),
                b=tensor_argument(self.pair_b),
                output=pointer(self.pair_output),
                bias=pointer(self.pair_bias),
                threshold=self.threshold,
            )
        return call


@functools.lru_cache(maxsize=64)
def _sized(batch: int, heads: int, kv_heads: int, queries: int, width: int, **numbers: int) -> abi.Mixture:
    """A call that is filled in with what most calls share; to be copied."""
    return abi.Mixture(batch=batch, heads=heads, kv_heads=kv_heads, queries=queries, head_width=width, **numbers)


def sized_call(
    batch: int, heads: int, kv_heads: int, queries: int, keys: int, width: int, **numbers: int
) -> abi.Mixture:
    """A call with its sizes and numbers, and no tensors yet."""
    call = abi.Mixture.from_buffer_copy(_sized(batch, heads, kv_heads, queries, width, **numbers))
    call.keys = keys
    return call


def _strides(table: Tensor) -> ctypes.Array[ctypes.c_int64]:
    """Of batch, head and query, for a table [H, N] or [B, H, T, N]: 0 for what shares a row."""
    strides = (0, table.stride(0), 0) if table.dim() == 2 else table.stride()[:3]
    return (ctypes.c_int64 * 3)(*strides)


class MixtureOutputs(NamedTuple):
    """The outputs of the forward; the last two, for the backward, are [0] unless `save`."""

    out: Tensor
    logsumexp: Tensor
    norm: Tensor
    branch_out: Tensor
    """The outputs of all branches but the last."""


def _forward(given: MixtureInputs) -> MixtureOutputs:
    inputs, made = given.laid_out(), _empty(given)
    call = inputs.call(made.logsumexp, made.norm)
    put_tensor(call, abi.Mixture.out, made.out)
    for m in range(made.branch_out.shape[0]):
        call.branch_out[m] = tensor_argument(made.branch_out[m])
    library.call("mixture_forward", call)
    return made


def _empty(given: MixtureInputs) -> MixtureOutputs:
    q, save, branches = given.q, given.save, given.window.shape[0]
    rows = (*q.shape[:3], branches)
    return MixtureOutputs(
        out=room_like(q),
        logsumexp=q.new_empty(rows, dtype=torch.float32),
        norm=q.new_empty((*rows, 2) if save else (0,), dtype=torch.float32),
        branch_out=q.new_empty((branches - 1, *q.shape) if save else (0,)),
    )


mixture_forward = Operator("mixture", MixtureInputs, MixtureOutputs, _forward, fake=_empty)


class MixtureBackwardInputs(NamedTuple):
    """The inputs of the backward. Gradients of q (float32, whatever q's dtype), k and v are written, or added."""

    grad_q: Tensor
    grad_k: Tensor
    grad_v: Tensor
    accumulate: bool
    grad_out: Tensor
    delta: Tensor
    """[B, H, T, M]: of each branch's output, and of the whole output for the last branch."""
    grad_logsumexp: Tensor | None
    logsumexp: Tensor
    norm: Tensor
    forward: MixtureInputs


class MixtureGradients(NamedTuple):
    """The other gradients; [0] for what there is none of."""

    weights: Tensor
    width: Tensor
    bias_table: Tensor
    pair_a: Tensor
    pair_b: Tensor
    pair_output: Tensor
    pair_bias: Tensor
    """[H] of every pair gate, whether it has a bias or not."""
    scale: Tensor
    """[H] of a pair gate; of other scores it follows from that of q (`scale_gradient`)."""


def _backward_kernel(given: MixtureBackwardInputs) -> MixtureGradients:
    made = _empty_gradients(given)
    # The gradient of a table has the table's strides: both without gaps.
    forward = given.forward._replace(bias_table=contiguous(given.forward.bias_table)).laid_out()
    grad_out, delta = rows_contiguous(given.grad_out), contiguous(given.delta)
    grad_logsumexp = contiguous(given.grad_logsumexp)
    call = abi.MixtureGrad(
        forward=forward.call(given.logsumexp, given.norm),
        grad_out=tensor_argument(grad_out),
        delta=pointer(delta),
        grad_logsumexp=pointer(grad_logsumexp),
        grad_q=tensor_argument(given.grad_q),
        grad_k=tensor_argument(given.grad_k),
        grad_v=tensor_argument(given.grad_v),
        accumulate=given.accumulate,
        grad_weights=pointer(made.weights),
        grad_pair_a=tensor_argument(made.pair_a),
        grad_pair_b=tensor_argument(made.pair_b),
        grad_pair_output=pointer(made.pair_output),
        grad_pair_bias=pointer(made.pair_bias),
        grad_scale=pointer(made.scale),
        grad_bias_table=pointer(made.bias_table),
    )
    if forward.width is not None:
        for m, one in enumerate(made.width.zero_()):
            call.grad_width[m] = pointer(one)
    library.call("mixture_backward", call)
    return made


def _empty_gradients(given: MixtureBackwardInputs) -> MixtureGradients:
    forward, nothing = given.forward, given.logsumexp.new_empty(0)

    def like(x: Tensor | None) -> Tensor:
        return nothing.clone() if x is None else x.new_empty(x.shape, dtype=torch.float32)

    per_head = nothing if forward.pair_output is None else forward.pair_output.new_empty(forward.q.shape[1])
    return MixtureGradients(
        weights=like(forward.weights),
        width=like(forward.width),
        bias_table=like(forward.bias_table),
        pair_a=like(forward.pair_a),
        pair_b=like(forward.pair_b),
        pair_output=like(forward.pair_output),
        pair_bias=torch.empty_like(per_head),
        scale=torch.empty_like(per_head),
    )


mixture_backward = Operator(
    "mixture_backward",
    MixtureBackwardInputs,
    MixtureGradients,
    _backward_kernel,
    fake=_empty_gradients,
    mutates=("grad_q", "grad_k", "grad_v"),
)


def _backward(ctx: Context[MixtureInputs, MixtureOutputs], grads: MixtureOutputs) -> Gradients:
    inputs, outputs = ctx.saved()
    if not inputs.save:
        raise RuntimeError("varifocal::mixture was called with save=False and cannot be differentiated")
    q, position, start = inputs.q, inputs.position, inputs.start
    grad_out = torch.zeros_like(q) if grads.out is None else grads.out
    deltas = [delta_of(grad_out, one, position, start) for one in (*outputs.branch_out, outputs.out)]
    logsumexp, norm = outputs.logsumexp, outputs.norm
    # The outputs have served: without them the gradients find room where they stood.
    del outputs
    ctx.release()
    dq, dk, dv = empty_gradients(q, inputs.k)
    others = mixture_backward(
        MixtureBackwardInputs(
            grad_q=dq,
            grad_k=dk,
            grad_v=dv,
            accumulate=False,
            grad_out=grad_out,
            delta=torch.stack(deltas, dim=-1),
            grad_logsumexp=grads.logsumexp,
            logsumexp=logsumexp,
            norm=norm,
            forward=inputs,
        )
    )
    dscale = None
    if ctx.wants("scale"):
        gated = inputs.pair_a is not None
        dscale = others.scale if gated else scale_gradient(dq, q, inputs.scale, position, start)
    wanted = ("weights", "width", "bias_table", "pair_a", "pair_b", "pair_output", "pair_bias")
    gradients = {name: getattr(others, name) for name in wanted if ctx.wants(name)}
    return gradients | {"q": dq.to(q.dtype), "k": dk, "v": dv, "scale": dscale}


def empty_gradients(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the gradients of q (float32, whatever its dtype), k and v."""
    return room_like(q, torch.float32), room_like(k), room_like(k)


def scale_gradient(grad_q: Tensor, q: Tensor, scale: Tensor, position: Tensor, start: Tensor) -> Tensor:
    """[H]: ds_ij / dscale = q_i . k_j, so the sum over keys is q . dq / scale."""
    along = delta_of(grad_q, q.float(), position, start)
    return along.sum((0, 2), dtype=torch.float64).float() / scale


mixture_forward.differentiate(_backward)
mixture_forward.autocast_to_float32()


def check_mixture(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    branches: Sequence[MixtureBranch],
    position: Tensor,
    start: Tensor,
    weights: Tensor | None = None,
    bias_table: Tensor | None = None,
) -> None:
    """ValueError unless the arguments of `mixture` fit together."""
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
    if bias_table is not None and bias_table.shape[:-1] not in ((heads,), rows):
        raise ValueError(
            f"a table of biases must be [H, N] or [B, H, T, N] with B, H, T = {batch}, {heads}, {queries}, "
            f"got {[*bias_table.shape]}"
        )


def mixture_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    branches: Sequence[MixtureBranch],
    position: Tensor,
    start: Tensor,
    weights: Tensor | None = None,
    scale: Tensor | float | None = None,
    bias_table: Tensor | None = None,
    skip_closed: bool = False,
) -> MixtureInputs:
    """The arguments of `mixture`, as its operators take them; they are known to fit together.

    With `skip_closed` a branch whose weights are 0, and constant, need not be read; its logsumexp is of no use then.
    """
    heads, rows = q.shape[1], q.shape[:3]
    widths = [branch.width for branch in branches]
    width = None
    if any(one is not None for one in widths):
        width = torch.stack([q.new_zeros(rows, dtype=torch.float32) if z is None else z.float() for z in widths])
    inputs = MixtureInputs(
        q=q,
        k=k,
        v=v,
        scale=scale_per_head(scale, q),
        position=position,
        start=start,
        weights=None if weights is None else weights.float(),
        width=width,
        window=per_head([branch.window for branch in branches], heads, "window"),
        prefix=per_head([branch.prefix for branch in branches], heads, "prefix"),
        limit=[branch.limit for branch in branches],
        edge=[0.0 if branch.width is None else branch.edge for branch in branches],
        skip_closed=skip_closed and weights is not None and not needs_backward(weights),
        save=False,
        score=DOT if bias_table is None else DISTANCE_BIAS,
        bias_table=None if bias_table is None else bias_table.float(),
    )
    return inputs._replace(save=True) if will_differentiate(inputs) else inputs


def per_head(numbers: Sequence[int | Tensor], heads: int, name: str) -> Tensor:
    """int32 [M, H] from a number, or one for each head, of each branch."""
    if all(isinstance(one, int) for one in numbers) and not torch.compiler.is_compiling():
        return same_for_all(tuple(numbers), heads)
    plain = torch.tensor([[0 if isinstance(one, Tensor) else one] * heads for one in numbers], dtype=torch.int32)
    given = [one for one in numbers if isinstance(one, Tensor)]
    if not given:
        return plain
    for one in given:
        if one.shape != (heads,) or one.dtype != torch.int32:
            raise ValueError(f"{name} must be a number or int32 [H] = [{heads}], got {one.dtype} {[*one.shape]}")
    return torch.stack([one if isinstance(one, Tensor) else row for one, row in zip(numbers, plain, strict=True)])


@functools.lru_cache(maxsize=256)
def same_for_all(numbers: tuple[int, ...], heads: int) -> Tensor:
    """int32 [M, H] with the same number in every head; made once, since every decoded token asks for it."""
    return torch.tensor([[one] * heads for one in numbers], dtype=torch.int32)


def will_differentiate(inputs: MixtureInputs) -> bool:
    """Whether a gradient may be asked for any of the inputs."""
    return torch.is_grad_enabled() and needs_backward(*(x for x in inputs if isinstance(x, Tensor)))


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
    bias_table: Tensor | None = None,
) -> Mixture:
    """Mixture attention on the CPU; differentiable in q, k, v, weights, scale, bias_table and the branches' widths.

    q [B, H, T, D], k and v [B, G, S, D] of one dtype (float32 or bfloat16), H a multiple of G. position and
    start [B, T] int32: query t may read keys start <= j <= position, none if start > position. weights
    [B, H, T, M] (None: all 1), scale a number or [H] (None: 1 / sqrt(D)). bias_table [H, N] or [B, H, T, N]: the entry
    at min(x, N - 1) is added to the score of a key at distance x; -inf for a distance that is not read.
    """
    check_mixture(q, k, v, branches=branches, position=position, start=start, weights=weights, bias_table=bias_table)
    made = mixture_forward(
        mixture_inputs(
            q, k, v,
            branches=branches, position=position, start=start, weights=weights, scale=scale, bias_table=bias_table,
        )
    )  # fmt: skip
    return Mixture(made.out, made.logsumexp)
