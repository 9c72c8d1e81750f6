"""How many pairs flex multiplies: all pairs of every tile that holds one that is read, counted before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from varifocal.equations.branches import (
    Branch,
    Causal,
    FixedBranch,
    Prefix,
    Segments,
    SoftWindow,
    TopK,
    Window,
    members,
)
from varifocal.equations.branches.head_sizes import each_head
from varifocal.kernels.flex.key_sets import Pattern
from varifocal.kernels.flex.nesting import chain, fixed_members, rings
from varifocal.kernels.flex.tiles import TILE, Kept, fingerprint, kept_look

FORWARD = 2
BACKWARD = 7
"""Products of a tile of queries with one of keys: FlexAttention makes scores and dP once for dQ and once for dK."""


def tile_pairs(branches: Sequence[Branch], *, length: int, heads: int) -> float | None:
    """Pairs in the tiles that one head (the mean one) reads in a text; None for a branch that is not known here.

    What a top-k selects is not known before: queries are taken to select independently of each other.
    """
    total = 0.0
    nested = chain(branches)
    if nested is not None:
        fixed = [fixed_members(branches[number]) or () for number in nested]
        total += sum(pairs_of(ring, length) for ring in rings(fixed))
    for number, branch in enumerate(branches):
        if nested is not None and number in nested:
            continue
        read = patterns_by_head(branch, heads)
        if read is None:
            return None
        chosen = sum(selected_pairs(member, length) for member in members(branch) if isinstance(member, TopK))
        # More than all tiles up to the queries' own it cannot be.
        most = pairs_of(Pattern((Causal(),)), length)
        total += min(most, chosen + sum(pairs_of(Pattern(inside), length) for inside in read) / heads)
        for member in (one for one in members(branch) if isinstance(one, Segments)):
            # Summaries, one for each segment: half of them are earlier ones.
            total += length * max(TILE, length / member.length) / 2
    return total


def patterns_by_head(branch: Branch, heads: int) -> list[tuple[FixedBranch, ...]] | None:
    """What holds all that each head reads of the keys themselves; None for a branch that is not known here."""
    inside: list[tuple[FixedBranch, ...]] = [()] * heads
    for member in members(branch):
        own: list[FixedBranch | None]
        if isinstance(member, TopK):
            own = [None] * heads
        elif isinstance(member, SoftWindow):
            own = [Window(member.limit)] * heads
        elif isinstance(member, Segments):
            own = [member.own] * heads
        elif isinstance(member, Window | Prefix) and isinstance(member.size, tuple):
            kind = type(member)
            own = [kind(size) if size else None for size in each_head(member.size)]
        elif isinstance(member, FixedBranch):
            own = [member] * heads
        else:
            return None
        inside = [(*found, *(() if one is None else (one,))) for found, one in zip(inside, own, strict=True)]
    return inside


def pairs_of(pattern: Pattern, length: int) -> float:
    """Pairs in the tiles of a pattern in a text of one document."""
    if not pattern.inside:
        return 0.0
    sets = (pattern,)
    some, _ = kept_look(Kept(fingerprint(sets), sets), length, length, device=torch.device("cpu"))
    return float(some.sum()) * TILE * TILE


def selected_pairs(branch: TopK, length: int) -> float:
    """Pairs in the tiles that hold a selected key, if each of a tile's queries selects at random."""
    place = torch.arange(length)
    draws = branch.count(place).double() / (branch.block if branch.select == "blocks" else 1)
    total = 0.0
    for first in range(0, length, TILE):
        columns = first // TILE + 1
        missed = (1 - 1 / columns) ** float(draws[first : first + TILE].sum())
        total += columns * (1 - missed) * TILE * TILE
    return total
