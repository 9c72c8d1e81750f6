"""Tiles of patterns that are runs of keys: from where each query's runs begin and end, without a look at pairs.

Of a window, a prefix, a block or everything, and of what one of them leaves of another, a query reads at most two
runs of neighbouring keys. Their ends are two numbers for each query: that is all that is read here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from varifocal.equations.branches import Causal, FixedBranch, Prefix, Window
from varifocal.equations.branches.base import largest
from varifocal.equations.branches.own_block import OwnBlock
from varifocal.kernels.flex.key_sets import KeySet, Pattern

OF_RUNS = (Causal, Window, Prefix, OwnBlock)
"""Branches that read their nearest keys, their first ones, and no others."""


class Span(NamedTuple):
    """A run of keys for each query, possibly empty."""

    begin: Tensor
    """[B, T]: the index of the first key."""
    end: Tensor
    """[B, T]: the index after the last key."""


def spans_of(member: KeySet, position: Tensor, start: Tensor) -> list[Span] | None:
    """The runs that queries read, together all that they read; None for a pattern that does not consist of runs."""
    if not isinstance(member, Pattern):
        return None
    # Exactly these types: a branch of a user's own may inherit from one and allow something else.
    if any(type(branch) not in OF_RUNS for branch in (*member.inside, *member.outside)):
        return None
    place = position - start
    near, first = widest(member.inside, place)
    # What is outside of the pattern is cut off both runs.
    near_outside, first_outside = widest(member.outside, place) if member.outside else (0, 0)
    begin, end = start + first_outside, position + 1 - near_outside
    gapless = position + 1 - near <= start + first
    nearest = Span(torch.where(gapless, begin, torch.maximum(begin, position + 1 - near)), end)
    if not any(isinstance(branch, Prefix) for branch in member.inside):
        return [nearest]
    return [nearest, Span(begin, torch.minimum(start + first, position + 1 - near_outside))]


def widest(branches: Sequence[FixedBranch], place: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the nearest and of the first keys [B, T] the union of the branches reads."""
    near = largest((branch.near(place) for branch in branches), place)
    return near, largest((branch.first(place) for branch in branches), place)


def tiles_of_spans(spans: Sequence[Span], keys: int, tile: int) -> tuple[Tensor, Tensor]:
    """bool [B, 1, R, C] twice: tiles that hold a key of a run, and tiles that one run holds for all of its queries."""
    columns = -(-keys // tile)
    first_key = torch.arange(columns, device=spans[0].begin.device) * tile
    some: Tensor | None = None
    every: Tensor | None = None
    for span in spans:
        # Queries that fill up the last row of tiles read nothing: a tile at the border is never full.
        begin, end = (by_tile(part, tile) for part in span)  # [B, R, tile]
        empty = begin >= end
        steps = begin.new_zeros(*begin.shape[:2], columns + 1)
        # One more from the tile of the first key on, one less after that of the last; an empty run cancels itself.
        ones = torch.ones_like(begin)
        after = torch.where(empty, columns, (end - 1).div(tile, rounding_mode="floor") + 1)
        steps.scatter_add_(2, torch.where(empty, columns, begin.div(tile, rounding_mode="floor")).long(), ones)
        steps.scatter_add_(2, after.long(), -ones)
        touched = steps.cumsum(dim=2)[..., :columns] > 0
        latest = torch.where(empty, keys, begin).amax(dim=2, keepdim=True)
        earliest = torch.where(empty, 0, end).amin(dim=2, keepdim=True)
        covered = (latest <= first_key) & (earliest >= first_key + tile)
        some = touched if some is None else some | touched
        every = covered if every is None else every | covered
    assert some is not None
    assert every is not None
    return some[:, None], every[:, None]


def by_tile(ends: Tensor, tile: int) -> Tensor:
    """[B, T] as [B, R, tile], filled up with zeros."""
    filled = F.pad(ends, (0, -ends.shape[1] % tile))
    return filled.view(len(filled), -1, tile)
