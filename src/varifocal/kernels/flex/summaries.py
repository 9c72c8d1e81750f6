"""What a combiner keeps of earlier segments: one key and one value for each, made of the segment's own entries."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from varifocal.equations.layout import Layout
from varifocal.equations.scores import Score
from varifocal.kernels.flex.whole_blocks import first_keys, gather_blocks


class Summaries(NamedTuple):
    """The summaries of all complete segments."""

    keys: Tensor
    """[B, H, N, D]: the elementwise maximum of a segment's keys."""
    values: Tensor
    """[B, H, N, D]: what the elementwise maximum of the segment's queries reads in it."""
    first: Tensor
    """int32 [B, N]: the segment's first key; S where there is none."""


def summarise(q: Tensor, k: Tensor, v: Tensor, *, length: int, score: Score, layout: Layout) -> Summaries | None:
    """The summaries of k and v [B, G, S, D] and of the queries that stood there [B, H, S, D]; None if none fits."""
    first = first_keys(layout, length)
    if not first.shape[1]:
        return None
    asking = gather_blocks(q, first, length).amax(dim=3)  # [B, H, N, D]
    keys, values = (
        gather_blocks(part, first, length).repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v)
    )  # [B, H, N, L, D]
    within = score.rate_blocks((asking[..., None, :] @ keys.mT).squeeze(-2), head_width=q.shape[-1])  # [B, H, N, L]
    read = (within.softmax(dim=-1)[..., None, :] @ values).squeeze(-2)
    return Summaries(keys.amax(dim=3), read, first.int())
