"""Segments with summaries, composed of two mixtures: the own segment, and the summaries of earlier ones.

Both are plain softmax attention, the second over one summary key and value for each segment. Joined by their
log-sum-exps they are one softmax over the union.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from varifocal.equations.layout import Layout
from varifocal.kernels.native.mixture import CAUSAL, MixtureBranch, mixture


def attend_segments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    queries: Tensor | None,
    length: int,
    layout: Layout,
    scale: Tensor | float,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, D] and log-sum-exp [B, H, T] (detached) of the branch Segments(length, queries)."""
    everything = [MixtureBranch(window=CAUSAL)]
    own_segment = layout.query_place // length
    own_start = torch.where(layout.query_place >= 0, layout.start + own_segment * length, layout.start)
    near = mixture(
        q, k, v, branches=everything, position=layout.position.int(), start=own_start.int(), scale=scale
    )  # fmt: skip
    segments = cut(layout, length)
    summary_keys, summary_values = summarize(q if queries is None else queries, k, v, segments, scale)
    # The summaries of a document stand one behind another; a query reads those before its own segment's.
    first = segments.number.gather(1, layout.start.clamp(max=layout.keys - 1))
    visible = (layout.query_place >= length) & (layout.query_place >= 0)
    far = mixture(
        q, summary_keys, summary_values, branches=everything, scale=scale,
        position=torch.where(visible, first + own_segment - 1, 0).int(), start=torch.where(visible, first, 1).int(),
    )  # fmt: skip
    return join(near.output, near.lse[..., 0], far.output, far.lse[..., 0])


class Segmented(NamedTuple):
    """The segments of each row."""

    number: Tensor
    """int64 [B, S]: the segment of each key, counted along the row; 0 for padding."""
    first: Tensor
    """int64 [B, N]: the first key of each segment, 0 where a row has fewer."""
    filled: Tensor
    """bool [B, N, L]: the keys that a segment has."""
    aligned: bool
    """Whether segment n begins at key n L in every row and all but the last are full."""


def cut(layout: Layout, length: int) -> Segmented:
    """The segments of a layout."""
    place, keys = layout.key_place, layout.keys
    begins = (place >= 0) & (place % length == 0)
    number = (begins.long().cumsum(dim=1) - 1).clamp(min=0)  # [B, S]
    count = -(-keys // length) if layout.one_document else int(number.max()) + 1
    index = torch.arange(keys, device=place.device).expand_as(place)
    belongs = torch.where(place >= 0, number, count)
    first = torch.full((len(place), count + 1), keys, device=place.device)
    first = first.scatter_reduce(1, belongs, index, "amin")[:, :count]
    within = torch.zeros(len(place), count + 1, dtype=torch.int64, device=place.device)
    sizes = within.scatter_add(1, belongs, torch.ones_like(index))[:, :count]
    filled = torch.arange(length, device=place.device) < sizes[..., None]
    return Segmented(number, first.clamp(max=max(keys - 1, 0)), filled, layout.one_document)


def summarize(
    queries: Tensor, k: Tensor, v: Tensor, segments: Segmented, scale: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Summary keys and values [B, H, N, D]: max k, and what max q reads of the segment, softmax(max q . K) V."""
    batch, heads = queries.shape[:2]
    groups = heads // k.shape[1]
    q_blocks, k_blocks, v_blocks = (by_segment(part, segments).float() for part in (queries, k, v))  # [B, *, N, L, D]
    empty = ~segments.filled[:, None, :, :, None]
    some = segments.filled.any(dim=2)[:, None, :, None]
    key, query = (
        part.masked_fill(empty, float("-inf")).amax(dim=3).masked_fill(~some, 0.0) for part in (k_blocks, q_blocks)
    )  # [B, *, N, D]
    query = query.view(batch, -1, groups, *query.shape[2:])  # [B, G, H / G, N, D]
    scores = torch.einsum("bgrnd,bgnld->bgrnl", query, k_blocks)
    factor = scale.view(-1, groups, 1, 1) if isinstance(scale, Tensor) else scale
    scores = (scores * factor).masked_fill(~segments.filled[:, None, None], float("-inf"))
    probabilities = scores.masked_fill(~some[:, :, None], 0.0).softmax(dim=-1)
    value = torch.einsum("bgrnl,bgnld->bgrnd", probabilities, v_blocks).flatten(1, 2)
    return key.repeat_interleave(groups, dim=1).to(k.dtype), value.to(v.dtype)


def by_segment(part: Tensor, segments: Segmented) -> Tensor:
    """Entries [B, *, S, D] by segment [B, *, N, L, D]; places that a segment does not have hold 0."""
    count, length = segments.filled.shape[1:]
    batch, heads, keys, width = part.shape
    if segments.aligned and count * length == keys:
        return part.unflatten(2, (count, length))  # type: ignore[no-untyped-call, no-any-return]
    index = segments.first[..., None] + torch.arange(length, device=part.device)  # [B, N, L]
    index = index.clamp(max=max(keys - 1, 0)).flatten(1)[:, None, :, None].expand(batch, heads, -1, width)
    gathered = part.gather(2, index).view(batch, heads, count, length, width)
    return gathered.masked_fill(~segments.filled[:, None, :, :, None], 0.0)


def join(near: Tensor, near_lse: Tensor, far: Tensor, far_lse: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax over two disjoint sets of keys, from the outputs and log-sum-exps over each."""
    lse = torch.logaddexp(near_lse, far_lse)
    blind = lse == float("-inf")
    base = lse.masked_fill(blind, 0.0)
    shares = ((part.masked_fill(blind, 0.0) - base).exp()[..., None] for part in (near_lse, far_lse))
    near_share, far_share = (share.masked_fill(blind[..., None], 0.0) for share in shares)
    return (near * near_share + far * far_share).to(near.dtype), lse.detach()
