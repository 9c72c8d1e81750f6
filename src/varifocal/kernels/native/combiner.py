"""Segments with summaries, composed of two mixtures: the own segment, and the summaries of earlier ones.

Both are plain softmax attention, the second over one summary key and value for each segment:

    k^_n = max_l k_nl      q^_n = max_l q_nl      p_nl = softmax_l(scale q^_n . k_nl)      v^_n = sum_l p_nl v_nl

Joined by their logsumexps they are one softmax over the union, o = sum_m w_m O_m with w_m = exp(lse_m - lse). Its
backward is that of two mixtures with the weights w_m and the deltas w_m dO . O: neither output need be kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from varifocal.equations.layout import Layout, make_layout
from varifocal.kernels.native.arguments import needs_backward, room_like, scale_per_head
from varifocal.kernels.native.delta import delta_of
from varifocal.kernels.native.mixture import (
    CAUSAL,
    MixtureBackwardInputs,
    MixtureInputs,
    empty_gradients,
    mixture_backward,
    mixture_forward,
    per_head,
    scale_gradient,
)
from varifocal.kernels.native.operator import Context, Gradients, Operator


class Segmented(NamedTuple):
    """The segments of each row, and what a query reads of them."""

    first: Tensor
    """int64 [B, N]: the first key of each segment, 0 where a row has fewer."""
    sizes: Tensor
    """int64 [B, N]: how many keys each segment has."""
    position: Tensor
    """int32 [B, T]: the query's own key."""
    start: Tensor
    """int32 [B, T]: the first key of the query's own segment."""
    far_position: Tensor
    """int32 [B, T]: the last segment before the query's own."""
    far_start: Tensor
    """int32 [B, T]: the first segment of the query's document; after far_position if there is none to read."""


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
    """Output [B, H, T, D] and logsumexp [B, H, T] (detached) of the branch Segments(length, queries, summaries)."""
    segments = cut(layout, length)
    factor = scale_per_head(scale, q)
    save = needs_backward(q, k, v, queries, factor)
    if summaries is not None and layout.one_document and not save:
        summary_key, summary_value = summaries.tensor_split(2, dim=-1)
        near, far = _near(q, k, v, factor, segments), _far(q, summary_key, summary_value, factor, segments)
        output, logsumexp, _ = read(near, far)
        return output, logsumexp[..., 0]
    aligned = layout.one_document and segments.sizes.shape[1] * length == layout.keys
    made = _operator(SegmentsInputs(q, k, v, queries, factor, segments, aligned=aligned, save=save))
    return made.out, made.logsumexp


def cut(layout: Layout, length: int) -> Segmented:
    """The segments of a layout."""
    place, keys = layout.key_place, layout.keys
    begins = (place >= 0) & (place % length == 0)
    number = (begins.long().cumsum(dim=1) - 1).clamp(min=0)  # [B, S]: the segment of each key, along the row
    count = -(-keys // length) if layout.one_document else int(number.max()) + 1 if number.numel() else 0
    index = torch.arange(keys, device=place.device).expand_as(place)
    belongs = torch.where(place >= 0, number, count)
    first = torch.full((len(place), count + 1), keys, device=place.device)
    first = first.scatter_reduce(1, belongs, index, "amin")[:, :count]
    within = torch.zeros(len(place), count + 1, dtype=torch.int64, device=place.device)
    sizes = within.scatter_add(1, belongs, torch.ones_like(index))[:, :count]
    own = layout.query_place // length
    # The summaries of a document stand one after another; a query reads those before its own segment's.
    own_document = number.gather(1, layout.start.clamp(max=keys - 1))
    far = (layout.query_place >= length) & (layout.query_place >= 0)
    return Segmented(
        first=first.clamp(max=max(keys - 1, 0)),
        sizes=sizes,
        position=layout.position.int(),
        start=torch.where(layout.query_place >= 0, layout.start + own * length, layout.start).int(),
        far_position=torch.where(far, own_document + own - 1, 0).int(),
        far_start=torch.where(far, own_document, 1).int(),
    )


class SegmentsInputs(NamedTuple):
    """The inputs of the forward."""

    q: Tensor
    k: Tensor
    v: Tensor
    queries: Tensor | None
    """Those that summaries are read with, if they are not q."""
    scale: Tensor
    segments: Segmented
    aligned: bool
    """Whether segment n begins at key n L in every row and all are full."""
    save: bool
    """Whether a backward follows."""


class SegmentsOutputs(NamedTuple):
    """The outputs of the forward; the last two, for the backward, are [0] unless `save`."""

    out: Tensor
    logsumexp: Tensor
    norms: Tensor
    """[2, B, H, T, 1, 2] of both parts."""
    part_logsumexp: Tensor
    """[2, B, H, T, 1] of both parts."""


class Part(NamedTuple):
    """What the backward needs to know of one of the two softmaxes."""

    norm: Tensor
    logsumexp: Tensor


def _forward(given: SegmentsInputs) -> SegmentsOutputs:
    q, k, v, scale, segments = given.q, given.k, given.v, given.scale, given.segments
    pooled = q if given.queries is None else given.queries
    summary_key, summary_value = summarize(pooled, k, v, scale, segments, given.aligned)
    near, far = _near(q, k, v, scale, segments), _far(q, summary_key, summary_value, scale, segments)
    out, logsumexp, parts = read(near._replace(save=given.save), far._replace(save=given.save))
    nothing = logsumexp.new_empty(0)
    return SegmentsOutputs(
        out=out,
        logsumexp=logsumexp[..., 0],
        norms=torch.stack([part.norm for part in parts]) if given.save else nothing,
        part_logsumexp=torch.stack([part.logsumexp for part in parts]) if given.save else nothing.clone(),
    )


def read(near: MixtureInputs, far: MixtureInputs) -> tuple[Tensor, Tensor, tuple[Part, Part]]:
    """Output [B, H, T, D] and logsumexp [B, H, T, 1] of both parts as one softmax, and what is kept of each part."""
    first, second = mixture_forward(near), mixture_forward(far)
    parts = Part(first.norm, first.logsumexp), Part(second.norm, second.logsumexp)
    norms = torch.stack([part.norm for part in parts]) if near.save else None
    output, logsumexp = join(first.out, second.out, torch.stack([part.logsumexp for part in parts]), norms)
    return output, logsumexp, parts


def join(first: Tensor, second: Tensor, logsumexps: Tensor, norms: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, D] and logsumexp [B, H, T, 1] of two disjoint parts as one softmax; their outputs are written.

    Both parts' logsumexps are [2, B, H, T, 1], their norms [2, B, H, T, 1, 2] or None.
    """
    logsumexp = torch.logaddexp(logsumexps[0], logsumexps[1])
    shares = torch.stack([_share(part, logsumexp) for part in logsumexps]) if norms is None else shares_of(norms)
    return first.mul_(shares[0].to(first.dtype)).add_(second.mul_(shares[1].to(second.dtype))), logsumexp


def _empty(given: SegmentsInputs) -> SegmentsOutputs:
    rows = (2, *given.q.shape[:3], 1)
    logsumexp = given.q.new_empty(given.q.shape[:3], dtype=torch.float32)
    return SegmentsOutputs(
        out=room_like(given.q),
        logsumexp=logsumexp,
        norms=logsumexp.new_empty((*rows, 2) if given.save else (0,)),
        part_logsumexp=logsumexp.new_empty(rows if given.save else (0,)),
    )


_operator = Operator("segments", SegmentsInputs, SegmentsOutputs, _forward, fake=_empty)


def _near(q: Tensor, k: Tensor, v: Tensor, scale: Tensor, segments: Segmented) -> MixtureInputs:
    """Attention within the query's own segment."""
    heads = q.shape[1]
    return MixtureInputs(
        q=q, k=k, v=v, scale=scale, position=segments.position, start=segments.start, weights=None, width=None,
        window=per_head([CAUSAL], heads, "window"), prefix=per_head([0], heads, "prefix"), limit=[0], edge=[0.0],
        skip_closed=False, save=False,
    )  # fmt: skip


def _far(q: Tensor, k: Tensor, v: Tensor, scale: Tensor, segments: Segmented) -> MixtureInputs:
    """Attention to the summaries [B, H, N, D] of earlier segments."""
    return _near(q, k, v, scale, segments)._replace(position=segments.far_position, start=segments.far_start)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """exp(part - whole), 0 where there is nothing in the whole."""
    return (part - whole).exp().masked_fill(whole == float("-inf"), 0.0)


def shares_of(norms: Tensor) -> Tensor:
    """The same of both parts [2, B, H, T, 1], from their norms [2, B, H, T, 1, 2]: these lose nothing to rounding."""
    top, factor = norms.unbind(dim=-1)
    top = top.masked_fill(factor == 0, float("-inf"))
    highest = top.amax(dim=0)
    sums = (top - highest.masked_fill(highest == float("-inf"), 0.0)).exp2() / factor.masked_fill(factor == 0, 1.0)
    total = sums.sum(dim=0)
    return sums / total.masked_fill(total == 0, 1.0)


class Stretch(NamedTuple):
    """Segments that are laid out at once, all as long as the longest of them."""

    part: slice
    """Which of the N segments."""
    first: Tensor
    """int64 [B, n]: the first key of each."""
    filled: Tensor
    """bool [B, n, L]: the keys that each has."""


def stretches(segments: Segmented, keys: int, aligned: bool) -> list[Stretch]:
    """All segments, few enough at once that they take twice the room of the text at the most."""
    count = segments.sizes.shape[1]
    if aligned:
        return [stretch_of(segments, slice(0, count), keys // max(count, 1))] if count else []
    found: list[Stretch] = []
    begin, longest = 0, 1
    sizes = segments.sizes.amax(dim=0).tolist() if segments.sizes.numel() else []
    for number, size in enumerate(sizes):
        if number > begin and (number + 1 - begin) * max(longest, size) > 2 * keys:
            found.append(stretch_of(segments, slice(begin, number), longest))
            begin, longest = number, 1
        longest = max(longest, size)
    return [*found, stretch_of(segments, slice(begin, count), longest)] if sizes else []


def stretch_of(segments: Segmented, part: slice, length: int) -> Stretch:
    """Some segments, each with room for `length` keys."""
    sizes = segments.sizes[:, part]
    filled = torch.arange(length, device=sizes.device) < sizes[..., None]
    return Stretch(part, segments.first[:, part], filled)


class Head(NamedTuple):
    """Some segments of one key head and of the query heads that share it."""

    number: int
    stretch: Stretch
    """N of them, up to L keys long."""
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
    for stretch in stretches(segments, k.shape[2], aligned):
        for number in range(k.shape[1]):
            yield head(number, queries, k, v, scale, stretch, aligned)


def head(number: int, queries: Tensor, k: Tensor, v: Tensor, scale: Tensor, stretch: Stretch, aligned: bool) -> Head:
    """A stretch of one key head, and its summaries."""
    groups = queries.shape[1] // k.shape[1]
    empty = ~stretch.filled[:, None, :, :, None]
    some = stretch.filled.any(dim=2)[:, None, :, None]  # [B, 1, N, 1]
    one = slice(number, number + 1)
    k_here, v_here = (by_segment(part[:, one], stretch, aligned).float() for part in (k, v))
    q_here = by_segment(queries[:, number * groups : (number + 1) * groups], stretch, aligned).float()
    k_highest = k_here
    if not aligned:
        q_here, k_highest = (part.masked_fill(empty, float("-inf")) for part in (q_here, k_here))
    summary_k, summary_q = (part.amax(dim=3).masked_fill(~some, 0.0) for part in (k_highest, q_here))
    scores = torch.einsum("brnd,bnld->brnl", summary_q, k_here[:, 0])
    factor = scale[number * groups : (number + 1) * groups, None, None]
    rated = (scores * factor).masked_fill(~stretch.filled[:, None], float("-inf"))
    probabilities = rated.masked_fill(~some, 0.0).softmax(dim=-1)
    return Head(number, stretch, k_here[:, 0], v_here[:, 0], q_here, summary_k[:, 0], summary_q, scores, probabilities)


def summarize(
    queries: Tensor, k: Tensor, v: Tensor, scale: Tensor, segments: Segmented, aligned: bool
) -> tuple[Tensor, Tensor]:
    """Summary keys and values [B, H, N, D]: max k, and what max q reads of the segment, softmax(max q . K) V."""
    batch, count, groups = k.shape[0], segments.first.shape[1], queries.shape[1] // k.shape[1]
    key, value = (part.new_empty(batch, k.shape[1], groups, count, k.shape[3]) for part in (k, v))
    for head in heads(queries, k, v, scale, segments, aligned):
        part = head.stretch.part
        key[:, head.number, :, part] = head.summary_k[:, None].to(k.dtype)
        value[:, head.number, :, part] = torch.einsum("brnl,bnld->brnd", head.probabilities, head.v).to(v.dtype)
    return key.flatten(1, 2), value.flatten(1, 2)


def summarize_full(queries: Tensor, k: Tensor, v: Tensor, *, length: int) -> tuple[Tensor, Tensor]:
    """The same of queries [B, H, N L, D], keys and values [B, G, N L, D] that are nothing but whole segments."""
    batch, _, keys, _ = k.shape
    layout = make_layout(batch=batch, queries=keys, keys=keys, documents=None, positions=None, device=k.device)
    return summarize(queries, k, v, scale_per_head(None, queries), cut(layout, length), True)


def by_segment(part: Tensor, stretch: Stretch, aligned: bool) -> Tensor:
    """Entries [B, *, S, D] by segment [B, *, N, L, D]; places that a segment does not have hold 0."""
    batch, count, length = stretch.filled.shape
    if aligned:
        return part.unflatten(2, (count, length))  # type: ignore[no-untyped-call, no-any-return]
    gathered = part.gather(2, places(part, stretch)).view(batch, part.shape[1], count, length, part.shape[3])
    return gathered.masked_fill(~stretch.filled[:, None, :, :, None], 0.0)


def places(part: Tensor, stretch: Stretch) -> Tensor:
    """Where the entries of segments lie in part [B, *, S, D]: [B, *, N L, D], any place for those that do not exist."""
    index = stretch.first[..., None] + torch.arange(stretch.filled.shape[2], device=part.device)  # [B, N, L]
    index = index.clamp(max=max(part.shape[2] - 1, 0)).flatten(1)[:, None, :, None]
    return index.expand(-1, part.shape[1], -1, part.shape[3])


def add_by_segment(to: Tensor, grad: Tensor, stretch: Stretch, aligned: bool) -> None:
    """Adds gradients [B, *, N, L, D] to entries [B, *, S, D], where they lie."""
    if aligned:
        to.add_(grad.flatten(2, 3))
        return
    grad = grad.masked_fill(~stretch.filled[:, None, :, :, None], 0.0).flatten(2, 3)
    to.scatter_add_(2, places(to, stretch), grad.to(to.dtype))


class SegmentsBackwardInputs(NamedTuple):
    """The inputs of the backward."""

    grad_out: Tensor
    delta: Tensor
    norms: Tensor
    part_logsumexp: Tensor
    forward: SegmentsInputs


class SegmentsGradients(NamedTuple):
    """Gradients of q (float32, whatever its dtype), k, v, queries ([0] without) and scale [H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    queries: Tensor
    scale: Tensor


def _backward_kernel(given: SegmentsBackwardInputs) -> SegmentsGradients:
    q, k, v, queries, scale, segments, aligned, _ = given.forward
    pooled = q if queries is None else queries
    summary_k, summary_v = summarize(pooled, k, v, scale, segments, aligned)
    dq, dk, dv = empty_gradients(q, k)
    dsummary_k, dsummary_v = torch.zeros_like(summary_k), torch.zeros_like(summary_v)
    near, far = _near(q, k, v, scale, segments), _far(q, summary_k, summary_v, scale, segments)
    # The near part writes dq, the far part adds to it.
    shares = shares_of(given.norms)
    for part, to_k, to_v, norm, logsumexp, share, adds in (
        (near, dk, dv, given.norms[0], given.part_logsumexp[0], shares[0], False),
        (far, dsummary_k, dsummary_v, given.norms[1], given.part_logsumexp[1], shares[1], True),
    ):
        mixture_backward(
            MixtureBackwardInputs(
                grad_q=dq,
                grad_k=to_k,
                grad_v=to_v,
                accumulate=adds,
                grad_out=given.grad_out,
                delta=share * given.delta[..., None],
                grad_logsumexp=None,
                logsumexp=logsumexp,
                norm=norm,
                forward=part._replace(weights=share),
            )
        )
    dscale = scale_gradient(dq, q, scale, segments.position, segments.start)
    dqueries = q.new_empty(0) if queries is None else torch.zeros_like(queries)
    groups = q.shape[1] // k.shape[1]
    for head in heads(pooled, k, v, scale, segments, aligned):
        own = slice(head.number * groups, (head.number + 1) * groups)
        one = slice(head.number, head.number + 1)
        stretch, filled = head.stretch, head.stretch.filled
        dvalue = dsummary_v[:, own, stretch.part].float()
        dkey = dsummary_k[:, own, stretch.part].float().sum(dim=1)
        dv_here = torch.einsum("brnl,brnd->bnld", head.probabilities, dvalue)
        add_by_segment(dv[:, one], dv_here[:, None], stretch, aligned)
        dp = torch.einsum("brnd,bnld->brnl", dvalue, head.v)
        ds = head.probabilities * (dp - (head.probabilities * dp).sum(dim=-1, keepdim=True))
        dscale[own] += (ds * head.scores).sum((0, 2, 3))
        ds = ds * scale[own, None, None]
        dk_here = torch.einsum("brnl,brnd->bnld", ds, head.summary_q)[:, None]
        dk_here += to_highest(dkey[:, None], head.summary_k[:, None], head.k[:, None], filled)
        add_by_segment(dk[:, one], dk_here, stretch, aligned)
        dsummary_q = torch.einsum("brnl,bnld->brnd", ds, head.k)
        to = dq if queries is None else dqueries
        add_by_segment(to[:, own], to_highest(dsummary_q, head.summary_q, head.q, filled), stretch, aligned)
    return SegmentsGradients(dq, dk, dv, dqueries, dscale)


def _empty_gradients(given: SegmentsBackwardInputs) -> SegmentsGradients:
    q, k, queries = given.forward.q, given.forward.k, given.forward.queries
    dqueries = q.new_empty(0) if queries is None else torch.empty_like(queries)
    return SegmentsGradients(*empty_gradients(q, k), dqueries, q.new_empty(q.shape[1], dtype=torch.float32))


_gradients = Operator(
    "segments_backward", SegmentsBackwardInputs, SegmentsGradients, _backward_kernel, fake=_empty_gradients
)


def _backward(ctx: Context[SegmentsInputs, SegmentsOutputs], grads: SegmentsOutputs) -> Gradients:
    inputs, outputs = ctx.saved()
    if not inputs.save:
        raise RuntimeError("varifocal::segments was called with save=False and cannot be differentiated")
    delta = delta_of(grads.out, outputs.out, inputs.segments.position, inputs.segments.start)
    kept = outputs.norms, outputs.part_logsumexp
    del outputs
    ctx.release()
    found = _gradients(SegmentsBackwardInputs(grads.out, delta, *kept, inputs))
    return {
        "q": found.q.to(inputs.q.dtype),
        "k": found.k,
        "v": found.v,
        "queries": None if inputs.queries is None else found.queries,
        "scale": found.scale if ctx.wants("scale") else None,
    }


def to_highest(grad: Tensor, highest: Tensor, of: Tensor, filled: Tensor) -> Tensor:
    """The gradient [B, R, N, D] of a maximum, shared out evenly among the entries [B, R, N, L, D] that reach it."""
    reached = (of == highest[..., None, :]) & filled[:, None, :, :, None]
    return reached * (grad / reached.sum(dim=-2).clamp(min=1))[..., None, :]


_operator.differentiate(_backward, without=("logsumexp", "norms", "part_logsumexp"))
_operator.autocast_to_float32()
