"""Segments with summaries, composed of two mixtures: the own segment, and the summaries of earlier ones.

Both are plain softmax attention, the second over one summary key and value for each segment:

    k^_n = max_l k_nl      q^_n = max_l q_nl      p_nl = softmax_l(scale q^_n . k_nl)      v^_n = sum_l p_nl v_nl

Joined by their log-sum-exps they are one softmax over the union, o = sum_m w_m O_m with w_m = exp(lse_m - lse). Its
backward is that of two mixtures with the weights w_m and the pulls w_m dO . O: neither output need be kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varifocal.equations.layout import Layout, make_layout
from varifocal.kernels.native.arguments import needs_backward, scale_per_head
from varifocal.kernels.native.mixture import (
    CAUSAL,
    MixtureInputs,
    empty_gradients,
    mixture_backward,
    mixture_forward,
    scale_gradient,
)
from varifocal.kernels.native.pull import pull_along, release


class Segmented(NamedTuple):
    """The segments of each row, and what a query reads of them."""

    first: Tensor
    """int64 [B, N]: the first key of each segment, 0 where a row has fewer."""
    filled: Tensor
    """bool [B, N, L]: the keys that a segment has."""
    position: Tensor
    """int32 [B, T]: the query's own key."""
    start: Tensor
    """int32 [B, T]: the first key of the query's own segment."""
    far_position: Tensor
    """int32 [B, T]: the last segment before the query's own."""
    far_start: Tensor
    """int32 [B, T]: the first segment of the query's document; behind far_position if there is none to read."""


def attend_segments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    queries: Tensor | None,
    length: int,
    layout: Layout,
    scale: Tensor | float,
    summaries: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, D] and log-sum-exp [B, H, T] (detached) of the branch Segments(length, queries, summaries)."""
    segments = cut(layout, length)
    tensors = (q, k, v, queries, scale_per_head(scale, q))
    if summaries is not None and layout.one_document and not needs_backward(*tensors):
        summary_key, summary_value = summaries.tensor_split(2, dim=-1)
        output, lse, *_ = read(q, k, v, summary_key, summary_value, tensors[-1], segments, save=False)
        return output, lse[..., 0]
    aligned = layout.one_document and segments.filled.shape[1] * length == layout.keys
    output, lse, *_ = _forward(*tensors, *segments, aligned, needs_backward(*tensors))
    return output, lse


def cut(layout: Layout, length: int) -> Segmented:
    """The segments of a layout."""
    place, keys = layout.key_place, layout.keys
    begins = (place >= 0) & (place % length == 0)
    number = (begins.long().cumsum(dim=1) - 1).clamp(min=0)  # [B, S]: the segment of each key, along the row
    count = -(-keys // length) if layout.one_document else int(number.max()) + 1
    index = torch.arange(keys, device=place.device).expand_as(place)
    belongs = torch.where(place >= 0, number, count)
    first = torch.full((len(place), count + 1), keys, device=place.device)
    first = first.scatter_reduce(1, belongs, index, "amin")[:, :count]
    within = torch.zeros(len(place), count + 1, dtype=torch.int64, device=place.device)
    sizes = within.scatter_add(1, belongs, torch.ones_like(index))[:, :count]
    own = layout.query_place // length
    # The summaries of a document stand one behind another; a query reads those before its own segment's.
    own_document = number.gather(1, layout.start.clamp(max=keys - 1))
    far = (layout.query_place >= length) & (layout.query_place >= 0)
    return Segmented(
        first=first.clamp(max=max(keys - 1, 0)),
        filled=torch.arange(length, device=place.device) < sizes[..., None],
        position=layout.position.int(),
        start=torch.where(layout.query_place >= 0, layout.start + own * length, layout.start).int(),
        far_position=torch.where(far, own_document + own - 1, 0).int(),
        far_start=torch.where(far, own_document, 1).int(),
    )


@torch.library.custom_op("varifocal::segments", mutates_args=(), device_types="cpu")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tensor | None,
    scale: Tensor,
    first: Tensor,
    filled: Tensor,
    position: Tensor,
    start: Tensor,
    far_position: Tensor,
    far_start: Tensor,
    aligned: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output and lse; for the backward norms [2, B, H, T, 1, 2] and lse [2, B, H, T, 1] of both parts, [0] unless save.

    `aligned` if segment n begins at key n L in every row and all are full.
    """
    segments = Segmented(first, filled, position, start, far_position, far_start)
    summaries = summarize(q if queries is None else queries, k, v, scale, segments, aligned)
    output, lse, norms, part_lse = read(q, k, v, *summaries, scale, segments, save=save)
    kept = (torch.stack(norms), torch.stack(part_lse)) if save else (lse.new_empty(0),) * 2
    return output, lse[..., 0], kept[0], kept[1].clone()


def read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    summary_key: Tensor,
    summary_value: Tensor,
    scale: Tensor,
    segments: Segmented,
    *,
    save: bool,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Output [B, H, T, D] and lse [B, H, T, 1] of both parts as one softmax, then the norms and lse of each part."""
    near, near_lse, near_norm, _ = mixture_forward(*_near(q, k, v, scale, segments), save)
    far, far_lse, far_norm, _ = mixture_forward(*_far(q, summary_key, summary_value, scale, segments), save)
    lse = torch.logaddexp(near_lse, far_lse)
    output = near.mul_(_share(near_lse, lse).to(near.dtype))
    output.add_(far.mul_(_share(far_lse, lse).to(far.dtype)))
    return output, lse, (near_norm, far_norm), (near_lse, far_lse)


@_forward.register_fake
def _(q: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = (2, *q.shape[:3], 1) if others[-1] else (0,)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    return torch.empty_like(q), lse, lse.new_empty((*rows, 2) if others[-1] else (0,)), lse.new_empty(rows)


def _near(q: Tensor, k: Tensor, v: Tensor, scale: Tensor, segments: Segmented) -> MixtureInputs:
    """Attention within the query's own segment."""
    return MixtureInputs(
        q, k, v, scale, segments.position, segments.start, None, None, [CAUSAL], [0], [0], [0.0], False
    )


def _far(q: Tensor, k: Tensor, v: Tensor, scale: Tensor, segments: Segmented) -> MixtureInputs:
    """Attention to the summaries [B, H, N, D] of earlier segments."""
    return _near(q, k, v, scale, segments)._replace(position=segments.far_position, start=segments.far_start)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """exp(part - whole), 0 where there is nothing in the whole."""
    return (part - whole).exp().masked_fill(whole == float("-inf"), 0.0)


class Head(NamedTuple):
    """The segments of one key head and of the query heads that share it."""

    number: int
    k: Tensor
    """[B, N, L, D] float32, 0 where a segment has no key."""
    v: Tensor
    """[B, N, L, D] float32, 0 where a segment has no key."""
    q: Tensor
    """[B, R, N, L, D] float32, minus infinity where a segment has no key."""
    summary_k: Tensor
    """[B, N, D]: k^."""
    summary_q: Tensor
    """[B, R, N, D]: q^."""
    scores: Tensor
    """[B, R, N, L]: q^ . k."""
    probabilities: Tensor
    """[B, R, N, L]: p."""


def heads(queries: Tensor, k: Tensor, v: Tensor, scale: Tensor, segments: Segmented, aligned: bool) -> Iterator[Head]:
    """The key heads one after another: only one is ever laid out by segments."""
    groups = queries.shape[1] // k.shape[1]
    empty = ~segments.filled[:, None, :, :, None]
    some = segments.filled.any(dim=2)[:, None, :, None]  # [B, 1, N, 1]
    for number in range(k.shape[1]):
        one = slice(number, number + 1)
        k_here, v_here = (by_segment(part[:, one], segments, aligned).float() for part in (k, v))
        q_here = by_segment(queries[:, number * groups : (number + 1) * groups], segments, aligned).float()
        k_highest = k_here
        if not aligned:
            q_here, k_highest = (part.masked_fill(empty, float("-inf")) for part in (q_here, k_here))
        summary_k, summary_q = (part.amax(dim=3).masked_fill(~some, 0.0) for part in (k_highest, q_here))
        scores = torch.einsum("brnd,bnld->brnl", summary_q, k_here[:, 0])
        factor = scale[number * groups : (number + 1) * groups, None, None]
        rated = (scores * factor).masked_fill(~segments.filled[:, None], float("-inf"))
        probabilities = rated.masked_fill(~some, 0.0).softmax(dim=-1)
        yield Head(number, k_here[:, 0], v_here[:, 0], q_here, summary_k[:, 0], summary_q, scores, probabilities)


def summarize(
    queries: Tensor, k: Tensor, v: Tensor, scale: Tensor, segments: Segmented, aligned: bool
) -> tuple[Tensor, Tensor]:
    """Summary keys and values [B, H, N, D]: max k, and what max q reads of the segment, softmax(max q . K) V."""
    batch, count, groups = k.shape[0], segments.first.shape[1], queries.shape[1] // k.shape[1]
    key, value = (part.new_empty(batch, k.shape[1], groups, count, k.shape[3]) for part in (k, v))
    for head in heads(queries, k, v, scale, segments, aligned):
        key[:, head.number] = head.summary_k[:, None].to(k.dtype)
        value[:, head.number] = torch.einsum("brnl,bnld->brnd", head.probabilities, head.v).to(v.dtype)
    return key.flatten(1, 2), value.flatten(1, 2)


def summarize_full(queries: Tensor, k: Tensor, v: Tensor, *, length: int) -> tuple[Tensor, Tensor]:
    """The same of queries [B, H, N L, D], keys and values [B, G, N L, D] that are nothing but whole segments."""
    batch, _, keys, _ = k.shape
    layout = make_layout(batch=batch, queries=keys, keys=keys, documents=None, positions=None, device=k.device)
    return summarize(queries, k, v, scale_per_head(None, queries), cut(layout, length), True)


def by_segment(part: Tensor, segments: Segmented, aligned: bool) -> Tensor:
    """Entries [B, *, S, D] by segment [B, *, N, L, D]; places that a segment does not have hold 0."""
    batch, count, length = segments.filled.shape
    if aligned:
        return part.unflatten(2, (count, length))  # type: ignore[no-untyped-call, no-any-return]
    gathered = part.gather(2, places(part, segments)).view(batch, part.shape[1], count, length, part.shape[3])
    return gathered.masked_fill(~segments.filled[:, None, :, :, None], 0.0)


def places(part: Tensor, segments: Segmented) -> Tensor:
    """Where the entries of segments lie in part [B, *, S, D]: [B, *, N L, D], any place for those that do not exist."""
    index = segments.first[..., None] + torch.arange(segments.filled.shape[2], device=part.device)  # [B, N, L]
    index = index.clamp(max=max(part.shape[2] - 1, 0)).flatten(1)[:, None, :, None]
    return index.expand(-1, part.shape[1], -1, part.shape[3])


def add_by_segment(to: Tensor, grad: Tensor, segments: Segmented, aligned: bool) -> None:
    """Adds gradients [B, *, N, L, D] to entries [B, *, S, D], in place."""
    if aligned:
        to.add_(grad.flatten(2, 3))
        return
    grad = grad.masked_fill(~segments.filled[:, None, :, :, None], 0.0).flatten(2, 3)
    to.scatter_add_(2, places(to, segments), grad.to(to.dtype))


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.aligned, ctx.save = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, *_):  # type: ignore[no-untyped-def]
    if not ctx.save:
        raise RuntimeError("varifocal::segments was called with save=False and cannot be differentiated")
    if grad_out is None:
        return (None,) * 13
    q, k, v, queries, scale, *cuts, output, lse, norms, part_lse = ctx.saved_tensors
    pull = pull_along(grad_out, output, cuts[2], cuts[3])
    del output
    release(ctx)
    dq, dk, dv, dqueries, dscale = _gradients(
        grad_out, pull, q, k, v, queries, scale, *cuts, lse, norms, part_lse, ctx.aligned
    )
    return (
        *(dq.to(q.dtype), dk, dv, None if queries is None else dqueries),
        *(dscale if ctx.needs_input_grad[4] else None, *(None,) * 8),
    )


@torch.library.custom_op("varifocal::segments_backward", mutates_args=(), device_types="cpu")
def _gradients(
    grad_out: Tensor,
    pull: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tensor | None,
    scale: Tensor,
    first: Tensor,
    filled: Tensor,
    position: Tensor,
    start: Tensor,
    far_position: Tensor,
    far_start: Tensor,
    lse: Tensor,
    norms: Tensor,
    part_lse: Tensor,
    aligned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q (float32, whatever its dtype), k, v, queries ([0] without) and scale [H]."""
    segments = Segmented(first, filled, position, start, far_position, far_start)
    pooled = q if queries is None else queries
    summary_k, summary_v = summarize(pooled, k, v, scale, segments, aligned)
    dq, dk, dv = empty_gradients(q, k)
    dsummary_k, dsummary_v = torch.zeros_like(summary_k), torch.zeros_like(summary_v)
    shares = [_share(part, lse[..., None]) for part in part_lse]
    pulls = [share * pull[..., None] for share in shares]
    near = _near(q, k, v, scale, segments)._replace(weights=shares[0])
    far = _far(q, summary_k, summary_v, scale, segments)._replace(weights=shares[1])
    mixture_backward(dq, dk, dv, False, grad_out, pulls[0], None, part_lse[0], norms[0], *near)
    mixture_backward(dq, dsummary_k, dsummary_v, True, grad_out, pulls[1], None, part_lse[1], norms[1], *far)
    dscale = scale_gradient(dq, q, scale, position, start)
    dqueries = q.new_empty(0) if queries is None else torch.zeros_like(queries)
    groups = q.shape[1] // k.shape[1]
    for head in heads(pooled, k, v, scale, segments, aligned):
        own = slice(head.number * groups, (head.number + 1) * groups)
        one = slice(head.number, head.number + 1)
        dvalue, dkey = dsummary_v[:, own].float(), dsummary_k[:, own].float().sum(dim=1)
        dv_here = torch.einsum("brnl,brnd->bnld", head.probabilities, dvalue)
        add_by_segment(dv[:, one], dv_here[:, None], segments, aligned)
        dp = torch.einsum("brnd,bnld->brnl", dvalue, head.v)
        ds = head.probabilities * (dp - (head.probabilities * dp).sum(dim=-1, keepdim=True))
        dscale[own] += (ds * head.scores).sum((0, 2, 3))
        ds = ds * scale[own, None, None]
        dk_here = torch.einsum("brnl,brnd->bnld", ds, head.summary_q)[:, None]
        dk_here += to_highest(dkey[:, None], head.summary_k[:, None], head.k[:, None], filled)
        add_by_segment(dk[:, one], dk_here, segments, aligned)
        dsummary_q = torch.einsum("brnl,bnld->brnd", ds, head.k)
        to = dq if queries is None else dqueries
        add_by_segment(to[:, own], to_highest(dsummary_q, head.summary_q, head.q, filled), segments, aligned)
    return dq, dk, dv, dqueries, dscale


@_gradients.register_fake
def _(grad_out: Tensor, pull: Tensor, q: Tensor, k: Tensor, v: Tensor, queries: Tensor | None, *others: Any) -> Any:
    dqueries = q.new_empty(0) if queries is None else torch.empty_like(queries)
    return (*empty_gradients(q, k), dqueries, q.new_empty(q.shape[1], dtype=torch.float32))


def to_highest(grad: Tensor, highest: Tensor, of: Tensor, filled: Tensor) -> Tensor:
    """The gradient [B, R, N, D] of a maximum, shared out evenly among the entries [B, R, N, L, D] that reach it."""
    reached = (of == highest[..., None, :]) & filled[:, None, :, :, None]
    return reached * (grad / reached.sum(dim=-2).clamp(min=1))[..., None, :]


_forward.register_autograd(_backward, setup_context=_setup_context)
_forward.register_autocast("cpu", torch.float32)
