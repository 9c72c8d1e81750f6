"""Entmax attention, some queries at a time: two products of blocks, and a threshold from the few keys near the best.

    p_ij = [(alpha - 1) s_ij - tau_i]_+^(1 / (alpha - 1)),   sum_j p_ij = 1

A key can have a weight above 0 only if (alpha - 1) s lies less than 1 below the query's best. These candidates are
taken out of the block of scores, tau is found from them by Newton's method in float64, and they are put back as
weights. The backward keeps nothing but three numbers a query: scores are products that it repeats. Plain torch, in
O(n) memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from varifocal.equations.layout import Layout
from varifocal.equations.normalizers import NEWTON_STEPS
from varifocal.kernels.native.arguments import needs_backward, room_like, scale_per_head
from varifocal.kernels.native.mixture import MixtureBranch, empty_gradients, scale_gradient
from varifocal.kernels.native.operator import Context, Gradients, Operator

MARGIN = 1e-4
"""How far a threshold in float32 may be off: some hundred roundings of powers and of sums of thousands of them."""
SCORES_AT_ONCE = 1 << 20
"""Bounds the block of scores: 4 MB, so that products, maximum and mask find it in a cache."""


def attend_entmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    branch: MixtureBranch,
    alpha: Tensor,
    layout: Layout,
    scale: Tensor | float,
    wants_logsumexp: bool,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, D] and logsumexp [B, H, T] (detached) of one branch with the same sizes in every head."""
    position, start = layout.ranges
    factor = scale_per_head(scale, q)
    assert isinstance(branch.window, int)
    assert isinstance(branch.prefix, int)
    made = _operator(
        EntmaxInputs(
            q=q, k=k, v=v, scale=factor, alpha=alpha.float(), position=position, start=start, window=branch.window,
            prefix=branch.prefix, wants_logsumexp=wants_logsumexp, save=needs_backward(q, k, v, factor, alpha),
        )
    )  # fmt: skip
    return made.out, made.logsumexp


class EntmaxInputs(NamedTuple):
    """The inputs of the forward."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: Tensor
    alpha: Tensor
    position: Tensor
    start: Tensor
    window: int
    prefix: int
    wants_logsumexp: bool
    save: bool
    """Whether a backward follows."""


class EntmaxOutputs(NamedTuple):
    """The outputs of the forward."""

    out: Tensor
    logsumexp: Tensor
    """[B, H, T]; 0 where nobody wants it."""
    threshold: Tensor
    """[B, H, T, 3]: the largest (alpha - 1) s of a query, and tau less that, in two parts; [0] unless `save`."""


class Block(NamedTuple):
    """Some queries of the heads that share a key head."""

    row: int
    kv_head: int
    heads: slice
    queries: slice
    keys: slice
    q: Tensor
    """[R, t, D] float32."""
    k: Tensor
    """[n, D] float32: the keys that any of these queries reads."""
    v: Tensor
    """[n, D] float32."""
    z: Tensor
    """[R, t, n]: (alpha - 1) s, minus infinity where nothing is read."""
    power: Tensor
    """float64 [R, 1, 1]: 1 / (alpha - 1)."""


def blocks(given: EntmaxInputs) -> Iterator[Block]:
    """All blocks, with their scores."""
    batch, heads, queries, _ = given.q.shape
    kv_heads = given.k.shape[1]
    groups = heads // max(kv_heads, 1)
    power = 1 / (given.alpha.double() - 1)
    factor = given.scale * (given.alpha - 1)
    for row in range(batch):
        position, start = given.position[row].long(), given.start[row].long()
        # Of a query without keys nothing is read, wherever it stands.
        first = (position - given.window + 1).maximum(start) if not given.prefix else start
        for kv_head in range(kv_heads):
            own = slice(kv_head * groups, (kv_head + 1) * groups)
            k, v = given.k[row, kv_head].float(), given.v[row, kv_head].float()
            begin = 0
            while begin < queries:
                end = min(queries, begin + max(8, SCORES_AT_ONCE // (groups * max(given.k.shape[2], 1))))
                part = slice(begin, end)
                begin = end
                sees = start[part] <= position[part]
                if not bool(sees.any()):
                    continue
                low, high = int(first[part][sees].min()), int(position[part][sees].max()) + 1
                keys = slice(low, high)
                index = torch.arange(low, high)
                last, begins = position[part, None], start[part, None]
                read = (index <= last) & (index >= begins)
                read &= (index > last - given.window) | (index < begins + given.prefix)
                # What nobody sees may hold anything, even NaN.
                seen = read.any(dim=0)[:, None]
                k_here, v_here = (x[keys].masked_fill(~seen, 0.0) for x in (k, v))
                q = given.q[row, own, part].float().masked_fill(~sees[:, None], 0.0)
                z = (q @ k_here.mT).mul_(factor[own, None, None]).masked_fill_(~read, float("-inf"))
                yield Block(row, kv_head, own, part, keys, q, k_here, v_here, z, power[own, None, None])


class Candidates(NamedTuple):
    """The few entries of a block of scores that may have a weight, in the order of rows."""

    mask: Tensor
    """bool [R, t, n]."""
    counts: Tensor
    """int64 [R t]."""
    ends: Tensor
    """int64 [R t]: where the candidates of each row end."""
    rows: Tensor
    """int64: the row of each candidate."""

    def sum(self, values: Tensor) -> Tensor:
        """float64 [R t]: the sum of each row's values."""
        totals = torch.cat((values.new_zeros(1), values.cumsum(dim=0)))
        return totals[self.ends] - totals[self.ends - self.counts]

    def spread(self, rows: Tensor) -> Tensor:
        """A number of each row for each of its candidates."""
        return rows.flatten()[self.rows]

    def put(self, like: Tensor, values: Tensor) -> Tensor:
        """Values back in their places, 0 elsewhere."""
        return torch.zeros_like(like, dtype=torch.float32).masked_scatter_(self.mask, values.float())


def candidates_of(mask: Tensor) -> Candidates:
    """Those that a mask [R, t, n] names."""
    counts = mask.sum(dim=-1).flatten()
    rows = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return Candidates(mask, counts, counts.cumsum(dim=0), rows)


def among(found: Candidates, values: Tensor, power: Tensor) -> tuple[Candidates, Tensor]:
    """The candidates that are left, and their values, after a first step of Newton from tau = -1 in float32.

    tau only grows from step to step, so that a key below it has no weight. MARGIN covers the roundings of this one.
    """
    base = (values + 1).clamp_(min=0)
    lower = base ** (power - 1)
    excess, slope = found.sum((lower * base).double()) - 1, found.sum((lower * power).double())
    least = torch.where(slope > 0, excess / slope, 0.0) - 1 - MARGIN
    left = values > found.spread(least.float())
    return candidates_of(torch.zeros_like(found.mask).masked_scatter_(found.mask, left)), values[left]


def solve(found: Candidates, values: Tensor, power: Tensor) -> Tensor:
    """float64 [R t]: tau less the row's largest value, from values less that value, in (-1, 0]."""
    tau = torch.full((len(found.counts),), -1.0, dtype=torch.float64)
    for _ in range(NEWTON_STEPS):
        base = (values - found.spread(tau)).clamp_(min=0)
        lower = torch.where(base > 0, base ** (power - 1), 0.0)
        excess, slope = found.sum(lower * base) - 1, found.sum(lower * power)
        moved = torch.where(slope > 0, tau + excess / slope, tau)
        # Convex and falling: steps go to the right, and what goes back is rounding.
        done = not bool((moved > tau + 1e-15).any())
        tau = torch.maximum(moved, tau)
        if done:
            break
    return tau


def _forward(given: EntmaxInputs) -> EntmaxOutputs:
    made = _empty(given)
    made.out.zero_()
    made.logsumexp.zero_()
    if given.wants_logsumexp:
        made.logsumexp.fill_(float("-inf"))
    if given.save:
        made.threshold.zero_()
    for block in blocks(given):
        z, shape = block.z, block.z.shape[:2]
        highest = z.amax(dim=-1, keepdim=True)
        highest = torch.where(highest == float("-inf"), 0.0, highest)
        found = candidates_of(z > highest - 1)
        values = z[found.mask] - found.spread(highest)
        found, values = among(found, values, found.spread(block.power.float().expand(*shape, 1)))
        values = values.double()
        power = found.spread(block.power.expand(*shape, 1))
        tau = solve(found, values, power)
        weights = (values - found.spread(tau)).clamp_(min=0) ** power
        out = found.put(z, weights) @ block.v
        made.out[block.row, block.heads, block.queries] = out.to(made.out.dtype)
        if given.save:
            # tau as a sum of two float32: near softmax, alpha's gradient is a difference of numbers far larger.
            kept = torch.stack((highest.flatten(), tau.float(), (tau - tau.float()).float()), dim=-1).view(*shape, 3)
            made.threshold[block.row, block.heads, block.queries] = kept
        if given.wants_logsumexp:
            natural = (z.double() * block.power).logsumexp(dim=-1)
            made.logsumexp[block.row, block.heads, block.queries] = natural.float()
    return made


def _empty(given: EntmaxInputs) -> EntmaxOutputs:
    rows = given.q.shape[:3]
    return EntmaxOutputs(
        out=room_like(given.q),
        logsumexp=given.q.new_empty(rows, dtype=torch.float32),
        threshold=given.q.new_empty((*rows, 3) if given.save else (0,), dtype=torch.float32),
    )


_operator = Operator("entmax", EntmaxInputs, EntmaxOutputs, _forward, fake=_empty)


class EntmaxBackwardInputs(NamedTuple):
    """The inputs of the backward."""

    grad_out: Tensor
    threshold: Tensor
    forward: EntmaxInputs


class EntmaxGradients(NamedTuple):
    """Gradients of q (float32, whatever its dtype), k, v and alpha [H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor


def _backward_kernel(given: EntmaxBackwardInputs) -> EntmaxGradients:
    forward = given.forward
    dq = room_like(forward.q, torch.float32).zero_()
    dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (forward.k, forward.v))
    dalpha = torch.zeros(forward.q.shape[1], dtype=torch.float64)
    for block in blocks(forward):
        at = (block.row, block.heads, block.queries)
        highest, tau, rest = given.threshold[at].unbind(dim=-1)
        z, shape = block.z, block.z.shape[:2]
        found = candidates_of(z > (highest + tau)[..., None])
        base = (z[found.mask] - found.spread(highest)).double() - found.spread(tau.double() + rest)
        base = base.clamp_(min=0)
        power = found.spread(block.power.expand(*shape, 1))
        lower = torch.where(base > 0, base ** (power - 1), 0.0)
        weights = lower * base
        # Of a query that sees nothing dO may hold anything.
        sees = (forward.start[block.row, block.queries] <= forward.position[block.row, block.queries])[:, None]
        grad = given.grad_out[at].float().masked_fill(~sees, 0.0)  # [R, t, D]
        dp = (grad @ block.v.mT)[found.mask].double()
        share = lower / found.spread(found.sum(lower).clamp(min=1e-300))
        ds = lower * (dp - found.spread(found.sum(share * dp)))
        logs = torch.where(weights > 0, weights * weights.clamp(min=1e-300).log(), 0.0)
        change = (weights - share) * power.square() - (logs - share * found.spread(found.sum(logs))) * power
        dalpha[block.heads] += found.sum(dp * change).view(shape).sum(dim=1)
        factor = forward.scale[block.heads, None, None]
        dscores, p = found.put(z, ds), found.put(z, weights)
        dq[at] = (dscores @ block.k).mul_(factor)
        dk[block.row, block.kv_head, block.keys] += (dscores.mT @ (block.q * factor)).sum(dim=0)
        dv[block.row, block.kv_head, block.keys] += (p.mT @ grad).sum(dim=0)
    return EntmaxGradients(dq, dk.to(forward.k.dtype), dv.to(forward.v.dtype), dalpha.float())


def _empty_gradients(given: EntmaxBackwardInputs) -> EntmaxGradients:
    forward = given.forward
    return EntmaxGradients(*empty_gradients(forward.q, forward.k), forward.alpha.new_empty(forward.q.shape[1]))


_gradients = Operator("entmax_backward", EntmaxBackwardInputs, EntmaxGradients, _backward_kernel, fake=_empty_gradients)


def _backward(ctx: Context[EntmaxInputs, EntmaxOutputs], grads: EntmaxOutputs) -> Gradients:
    inputs, outputs = ctx.saved()
    if not inputs.save:
        raise RuntimeError("varifocal::entmax was called with save=False and cannot be differentiated")
    found = _gradients(EntmaxBackwardInputs(grads.out, outputs.threshold, inputs))
    q, position, start = inputs.q, inputs.position, inputs.start
    return {
        "q": found.q.to(q.dtype),
        "k": found.k,
        "v": found.v,
        "alpha": found.alpha if ctx.wants("alpha") else None,
        "scale": scale_gradient(found.q, q, inputs.scale, position, start) if ctx.wants("scale") else None,
    }


_operator.differentiate(_backward, without=("logsumexp", "threshold"))
_operator.autocast_to_float32()
