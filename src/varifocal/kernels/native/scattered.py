"""Keys scattered over the text beside windows and prefixes, composed of two mixtures.

Strided keys, and blocks that are drawn at random, are neighbours once the keys are put into another order: then they
are plain ranges, which the mixture kernel reads by tiles. What the windows and prefixes of the same softmax read is
left out of the ranges, so both parts are disjoint. Joined by their logsumexps they are one softmax over the union,
o = sum_m w_m O_m with w_m = exp(lse_m - lse), as in combiner.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from varifocal.equations.branches import RandomBlocks, Strided
from varifocal.equations.layout import Layout
from varifocal.kernels.native.arguments import needs_backward, room_like, scale_per_head
from varifocal.kernels.native.combiner import join, shares_of
from varifocal.kernels.native.delta import delta_of
from varifocal.kernels.native.mixture import (
    CAUSAL,
    MixtureBackwardInputs,
    MixtureBranch,
    MixtureInputs,
    empty_gradients,
    mixture_backward,
    mixture_forward,
    per_head,
    scale_gradient,
)
from varifocal.kernels.native.operator import Context, Gradients, Operator

FEW = 16
"""Queries that each get their scattered keys gathered: more of them share what is put in order once."""


@dataclass(frozen=True)
class ScatteredBranch:
    """One softmax over a window, a prefix and scattered keys."""

    near: MixtureBranch
    """Without a soft part, and with the same sizes in every head."""
    far: Strided | RandomBlocks


class Order(NamedTuple):
    """Keys in an order in which those that a query reads are neighbours."""

    keys: Tensor
    """int64 [B, N]: the key at each place of the order."""
    queries: Tensor | None
    """int64 [B, T]: the order in which queries come; None for their own."""
    position: Tensor
    """int32 [B, T]: the last place that each query reads, in the order of the queries."""
    start: Tensor
    """int32 [B, T]: the first one; after `position` if there is none."""


def order_of(branch: ScatteredBranch, layout: Layout) -> Order:
    """The order of a layout; made once for all layers that share both."""
    window, prefix = branch.near.window, branch.near.prefix
    assert isinstance(window, int)
    assert isinstance(prefix, int)
    name = f"{branch.far!r} beside {window} and {prefix}"
    if name not in layout.derived:
        far = branch.far
        if isinstance(far, RandomBlocks):
            made = drawn(far, layout, window, prefix)
        elif layout.position.shape[1] <= FEW:
            made = strided_of_few(far.stride, layout, window, prefix)
        else:
            made = strided(far.stride, layout, window, prefix)
        layout.derived[name] = made
    found: Order = layout.derived[name]
    return found


def strided(stride: int, layout: Layout, window: int, prefix: int) -> Order:
    """Keys by their document and their place modulo the stride: a query's keys are those before it in its class."""
    keys, place = layout.keys, layout.key_place
    # Padding keys come last; no range reaches them.
    of_class = torch.where(place >= 0, layout.key_start * stride + place % stride, (keys + 1) * stride)
    order = of_class.argsort(dim=1, stable=True)  # [B, S]
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(keys).expand_as(order))
    own = rank.gather(1, layout.position.clamp(0, max(keys - 1, 0)))  # [B, T]
    queries = own.argsort(dim=1, stable=True)
    begin = own - layout.query_place // stride
    position, start = without_near(layout.query_place, begin, own, stride, window, prefix)
    return Order(order, queries, position.gather(1, queries).int(), start.gather(1, queries).int())


def strided_of_few(stride: int, layout: Layout, window: int, prefix: int) -> Order:
    """A stretch of its own for every query."""
    place, most = layout.query_place, -(-layout.keys // stride)
    steps = torch.arange(most) * stride
    keys = (layout.start + place % stride)[..., None] + steps  # [B, T, N]
    begin = torch.arange(place.shape[1]) * most
    position, start = without_near(place, begin, begin + place // stride, stride, window, prefix)
    return Order(keys.clamp(max=max(layout.keys - 1, 0)).flatten(1), None, position.int(), start.int())


def without_near(
    place: Tensor, begin: Tensor, own: Tensor, stride: int, window: int, prefix: int
) -> tuple[Tensor, Tensor]:
    """Last and first place of a class that begins at `begin` and has the query's own key at `own`."""
    # Of the distances 0, stride, 2 stride, ... the window has those below its size.
    position = own - -(-window // stride)
    start = begin + ((prefix - place % stride + stride - 1) // stride).clamp(min=0)
    nothing = (place < 0) | (start > position)
    return torch.where(nothing, 0, position), torch.where(nothing, 1, start)


def drawn(branch: RandomBlocks, layout: Layout, window: int, prefix: int) -> Order:
    """A stretch for every block of queries: the blocks of keys that were drawn for it, in the order of the text."""
    place, length = layout.query_place, branch.block
    number = groups(layout, length)  # [B, T]
    count = count_groups(layout, number, length)
    first = torch.full((len(place), count), place.shape[1]).scatter_reduce(
        1, number, torch.arange(place.shape[1]).expand_as(number), "amin"
    )
    first = first.clamp(max=max(place.shape[1] - 1, 0))  # a row may have fewer groups: any query for those
    of_group, document = place.gather(1, first), layout.start.gather(1, first)  # [B, N]
    blocks = torch.stack(branch.draws(of_group), dim=-1).sort(dim=-1).values  # [B, N, R]
    again = torch.zeros_like(blocks, dtype=torch.bool)
    again[..., 1:] = blocks[..., 1:] == blocks[..., :-1]
    none = again | (of_group < length)[..., None]
    # What is not drawn goes to the end of the stretch, where no range reaches.
    blocks = blocks.masked_fill(none, layout.keys).sort(dim=-1).values
    keys = document[..., None, None] + blocks[..., None] * length + torch.arange(length)  # [B, N, R, L]
    begins = blocks.gather(1, number[..., None].expand(-1, -1, branch.blocks)) * length  # [B, T, R]
    begin = number * (branch.blocks * length)
    # Blocks ascend: what the prefix has lies at the beginning of the stretch, what the window has at the end.
    start = begin + (prefix - begins).clamp(0, length).sum(dim=-1)
    position = begin + ((place + 1 - window)[..., None] - begins).clamp(0, length).sum(dim=-1) - 1
    nothing = (place < 0) | (start > position)
    return Order(
        keys.clamp(max=max(layout.keys - 1, 0)).flatten(1),
        None,
        torch.where(nothing, 0, position).int(),
        torch.where(nothing, 1, start).int(),
    )


def groups(layout: Layout, length: int) -> Tensor:
    """int64 [B, T]: neighbouring queries in the same block of the same document have the same number."""
    block, start = layout.query_place // length, layout.start
    begins = torch.ones_like(block)
    begins[:, 1:] = (block[:, 1:] != block[:, :-1]) | (start[:, 1:] != start[:, :-1])
    return begins.cumsum(dim=1) - 1


def count_groups(layout: Layout, number: Tensor, length: int) -> int:
    """How many there are in the fullest row, without a look at values where that can be."""
    keys, queries = layout.keys, number.shape[1]
    if not number.numel():
        return 0
    if layout.one_document and layout.at_end:
        return (keys - 1) // length - (keys - queries) // length + 1
    return int(number.max()) + 1


def attend_scattered(
    q: Tensor, k: Tensor, v: Tensor, *, branch: ScatteredBranch, layout: Layout, scale: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, D] and logsumexp [B, H, T] (detached) of a branch."""
    position, start = layout.ranges
    heads, factor = q.shape[1], scale_per_head(scale, q)
    made = _operator(
        ScatteredInputs(
            q=q,
            k=k,
            v=v,
            scale=factor,
            position=position,
            start=start,
            window=per_head([branch.near.window], heads, "window"),
            prefix=per_head([branch.near.prefix], heads, "prefix"),
            order=order_of(branch, layout),
            save=needs_backward(q, k, v, factor),
        )
    )
    return made.out, made.logsumexp


class ScatteredInputs(NamedTuple):
    """The inputs of the forward."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: Tensor
    position: Tensor
    start: Tensor
    window: Tensor
    prefix: Tensor
    order: Order
    save: bool
    """Whether a backward follows."""

    def near(self) -> MixtureInputs:
        """The window and the prefix."""
        return MixtureInputs(
            q=self.q, k=self.k, v=self.v, scale=self.scale, position=self.position, start=self.start, weights=None,
            width=None, window=self.window, prefix=self.prefix, limit=[0], edge=[0.0], skip_closed=False,
            save=self.save,
        )  # fmt: skip

    def far(self) -> MixtureInputs:
        """The scattered keys, in their order."""
        heads = self.q.shape[1]
        return self.near()._replace(
            q=self.in_order(self.q),
            k=take(self.k, self.order.keys),
            v=take(self.v, self.order.keys),
            position=self.order.position,
            start=self.order.start,
            window=per_head([CAUSAL], heads, "window"),
            prefix=per_head([0], heads, "prefix"),
        )

    def in_order(self, rows: Tensor) -> Tensor:
        """Rows [B, H, T, ...] of queries in the order of the scattered keys."""
        return rows if self.order.queries is None else take(rows, self.order.queries)

    def back(self, rows: Tensor) -> Tensor:
        """The reverse."""
        if self.order.queries is None:
            return rows
        return put(torch.empty_like(rows), self.order.queries, rows)


def take(rows: Tensor, index: Tensor) -> Tensor:
    """Rows [B, *, S, ...] at index [B, N]: [B, *, N, ...]."""
    if len(index) == 1:
        return rows.index_select(2, index[0])
    taken = [one.index_select(1, at) for one, at in zip(rows, index, strict=True)]
    return torch.stack(taken) if taken else rows.new_empty(0, rows.shape[1], index.shape[1], *rows.shape[3:])


def put(to: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """The reverse for an index that names every row once; `to` is written."""
    for b, one in enumerate(index):
        to[b].index_copy_(1, one, rows[b])
    return to


def add(to: Tensor, index: Tensor, rows: Tensor) -> None:
    """Adds rows [B, *, N, D] to those at index [B, N] of `to` [B, *, S, D]."""
    for b, one in enumerate(index):
        to[b].index_add_(1, one, rows[b])


class ScatteredOutputs(NamedTuple):
    """The outputs of the forward; the last two, for the backward, are [0] unless `save`."""

    out: Tensor
    logsumexp: Tensor
    norms: Tensor
    """[2, B, H, T, 1, 2] of both parts, in the queries' own order."""
    part_logsumexp: Tensor
    """[2, B, H, T, 1] of both parts."""


def _forward(given: ScatteredInputs) -> ScatteredOutputs:
    near, far = mixture_forward(given.near()), mixture_forward(given.far())
    parts = torch.stack((near.logsumexp, given.back(far.logsumexp)))
    norms = torch.stack((near.norm, given.back(far.norm))) if given.save else near.norm
    out, logsumexp = join(near.out, given.back(far.out), parts, norms if given.save else None)
    return ScatteredOutputs(out, logsumexp[..., 0], norms, parts if given.save else parts.new_empty(0))


def _empty(given: ScatteredInputs) -> ScatteredOutputs:
    rows = (2, *given.q.shape[:3], 1)
    logsumexp = given.q.new_empty(given.q.shape[:3], dtype=torch.float32)
    return ScatteredOutputs(
        out=room_like(given.q),
        logsumexp=logsumexp,
        norms=logsumexp.new_empty((*rows, 2) if given.save else (0,)),
        part_logsumexp=logsumexp.new_empty(rows if given.save else (0,)),
    )


_operator = Operator("scattered", ScatteredInputs, ScatteredOutputs, _forward, fake=_empty)


class ScatteredBackwardInputs(NamedTuple):
    """The inputs of the backward."""

    grad_out: Tensor
    delta: Tensor
    norms: Tensor
    part_logsumexp: Tensor
    forward: ScatteredInputs


class ScatteredGradients(NamedTuple):
    """Gradients of q (float32, whatever its dtype), k and v."""

    q: Tensor
    k: Tensor
    v: Tensor


def _backward_kernel(given: ScatteredBackwardInputs) -> ScatteredGradients:
    forward, order = given.forward, given.forward.order
    dq, dk, dv = empty_gradients(forward.q, forward.k)
    shares = shares_of(given.norms)
    delta = shares * given.delta[..., None]

    def differentiate(part: MixtureInputs, number: int, to: tuple[Tensor, ...], grad_out: Tensor) -> None:
        here = forward.in_order if number else same
        mixture_backward(
            MixtureBackwardInputs(
                grad_q=to[0],
                grad_k=to[1],
                grad_v=to[2],
                accumulate=False,
                grad_out=grad_out,
                delta=here(delta[number]),
                grad_logsumexp=None,
                logsumexp=here(given.part_logsumexp[number]),
                norm=here(given.norms[number]),
                forward=part._replace(weights=here(shares[number])),
            )
        )

    differentiate(forward.near(), 0, (dq, dk, dv), given.grad_out)
    far = forward.far()
    to = empty_gradients(far.q, far.k)
    differentiate(far, 1, to, forward.in_order(given.grad_out))
    if order.queries is None:
        dq += to[0]
    else:
        add(dq, order.queries, to[0])
    add(dk, order.keys, to[1])
    add(dv, order.keys, to[2])
    return ScatteredGradients(dq, dk, dv)


def same(rows: Tensor) -> Tensor:
    """As they are."""
    return rows


def _empty_gradients(given: ScatteredBackwardInputs) -> ScatteredGradients:
    return ScatteredGradients(*empty_gradients(given.forward.q, given.forward.k))


_gradients = Operator(
    "scattered_backward", ScatteredBackwardInputs, ScatteredGradients, _backward_kernel, fake=_empty_gradients
)


def _backward(ctx: Context[ScatteredInputs, ScatteredOutputs], grads: ScatteredOutputs) -> Gradients:
    inputs, outputs = ctx.saved()
    if not inputs.save:
        raise RuntimeError("varifocal::scattered was called with save=False and cannot be differentiated")
    q, position, start = inputs.q, inputs.position, inputs.start
    delta = delta_of(grads.out, outputs.out, position, start)
    kept = outputs.norms, outputs.part_logsumexp
    del outputs
    ctx.release()
    found = _gradients(ScatteredBackwardInputs(grads.out, delta, *kept, inputs))
    return {
        "q": found.q.to(q.dtype),
        "k": found.k,
        "v": found.v,
        "scale": scale_gradient(found.q, q, inputs.scale, position, start) if ctx.wants("scale") else None,
    }


_operator.differentiate(_backward, without=("logsumexp", "norms", "part_logsumexp"))
_operator.autocast_to_float32()
