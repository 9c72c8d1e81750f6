"""Which tiles of 128 queries and 128 keys hold a pair that is read: FlexAttention skips all others.

Runs of keys are told by their ends; another pattern of positions is looked at pair by pair, a few rows of tiles at a
time; what a top-k selected is entered key by key. Nothing of size T x S exists. Patterns of texts without documents
are kept for the next call, those with documents for the layers that share a layout.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from varifocal.equations.branches import FixedBranch, Prefix, Window
from varifocal.kernels.flex.key_sets import ByHead, Drawn, KeySet, Pattern, Selected, Soft
from varifocal.kernels.flex.pair import Pair
from varifocal.kernels.flex.reading import Reading
from varifocal.kernels.flex.spans import spans_of, tiles_of_spans

TILE = 128
"""FlexAttention's own default: a multiple of every block size that its kernels try."""
PAIRS_AT_A_TIME = 1 << 23
"""Bounds the memory of looking at a pattern: some bytes for each."""
KEPT = 64
"""Patterns kept: a model has a few branches, and training a few lengths."""


@dataclass(frozen=True, eq=False)
class Tiles:
    """Lists of tiles, as FlexAttention takes them; B and H are 1 where rows or heads do not differ.

    R rows of tiles of queries and C columns of tiles of keys, both at least 2: sizes of 1 get kernels of their own.
    """

    partial_count: Tensor
    """int32 [B, H, R]: tiles of a row in which some pairs are read."""
    partial: Tensor
    """int32 [B, H, R, C]: their columns, ascending; the rest of the row is not looked at."""
    full_count: Tensor
    """int32 [B, H, R]: tiles of a row in which all pairs are read, so that no pair needs to be asked."""
    full: Tensor
    """int32 [B, H, R, C]."""
    columns: tuple[Tensor, Tensor, Tensor, Tensor] | None
    """The same four by column, for the backward pass; None if there is none."""


LISTED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""By the positions of a layout, which the layers of a model share: what was listed for it, by pattern."""


def make_tiles(reading: Reading, *, at_end: bool, backward: bool) -> Tiles:
    """The tiles of a reading; `at_end` if its queries are known to be the last ones of one document."""
    said = None if at_end else fingerprint(reading.sets)
    if said is None:
        return fresh_tiles(reading, at_end=at_end, backward=backward)
    listed: dict[Hashable, tuple[Tensor, Tiles]] = LISTED.setdefault(reading.position, {})  # type: ignore[no-untyped-call]
    # Numbers that were changed in place since are others.
    versions = (reading.position._version, reading.start._version)
    sizes = (reading.q.shape[2], reading.k.shape[2])
    key = (said, *sizes, versions, backward)
    if key not in listed or listed[key][0] is not reading.start:
        listed[key] = (reading.start, fresh_tiles(reading, at_end=at_end, backward=backward))
    return listed[key][1]


def fresh_tiles(reading: Reading, *, at_end: bool, backward: bool) -> Tiles:
    """The same, unless they follow from pattern and lengths listed anew."""
    patterns = tuple(tile_pattern(member) for member in reading.sets if not isinstance(member, Selected | ByHead))
    by_heads = [member for member in reading.sets if isinstance(member, ByHead)]
    selections = [member for member in reading.sets if isinstance(member, Selected)]
    selected = [selected_tiles(one, reading) for one in selections]
    patterns += tuple(Pattern((one.own,)) for one in selections if one.own is not None)
    # A tile is full only if it follows from positions that every pair of it is read.
    exact = not selections and not any(isinstance(member, Soft) for member in reading.sets)
    if not selected and not by_heads and at_end and all(isinstance(pattern, Pattern) for pattern in patterns):
        # Only here do the tiles follow from pattern and lengths alone, so that another call may use them again.
        kept = Kept(fingerprint(patterns), patterns)
        if kept.pattern is not None:
            sizes = (reading.q.shape[2], reading.k.shape[2])
            return kept_tiles(kept, *sizes, exact=exact, backward=backward, device=reading.q.device)
    touched, covered = pattern_tiles(patterns, reading) if patterns else (None, None)
    for member in by_heads:
        some, every = head_tiles(member, reading, at_end=at_end)
        touched = some if touched is None else touched | some
        # A tile that only both together fill stays one in which every pair is asked.
        covered = every if covered is None else covered | every
    for found in selected:
        touched = found if touched is None else touched | found
    assert touched is not None
    return list_tiles(touched, covered if exact else None, backward=backward)


def tile_pattern(member: KeySet) -> KeySet:
    """A set of positions that holds all of the given set's pairs: a soft window reads within its limit."""
    if isinstance(member, Soft):
        return Pattern((Window(member.branch.limit),))
    return Pattern((member.branch,)) if isinstance(member, Drawn) else member


@dataclass(frozen=True)
class Kept:
    """A pattern by what it says, so that equal ones are found again."""

    pattern: Hashable
    sets: tuple[KeySet, ...] = field(compare=False)


def fingerprint(patterns: tuple[KeySet, ...]) -> Hashable:
    """What patterns say, as a value to compare; None if there are other sets, or what cannot be compared."""

    def of(branch: FixedBranch) -> Hashable:
        # A branch of a user's own may keep attributes that its equality does not look at.
        return (type(branch), tuple(sorted(vars(branch).items())))

    if not all(isinstance(pattern, Pattern) for pattern in patterns):
        return None
    said = tuple(
        (tuple(of(branch) for branch in pattern.inside), tuple(of(branch) for branch in pattern.outside))
        for pattern in patterns
        if isinstance(pattern, Pattern)
    )
    try:
        hash(said)
    except TypeError:
        return None
    return said


@functools.lru_cache(maxsize=KEPT)
def kept_tiles(kept: Kept, queries: int, keys: int, *, exact: bool, backward: bool, device: torch.device) -> Tiles:
    """The tiles of a pattern over the last `queries` of `keys` keys."""
    touched, covered = kept_look(kept, queries, keys, device=device)
    return list_tiles(touched, covered if exact else None, backward=backward)


def head_tiles(member: ByHead, reading: Reading, *, at_end: bool) -> tuple[Tensor, Tensor]:
    """bool [B, H, R, C] twice: tiles in which some pairs are read, and in which all are; equal heads are seen once."""
    found = {}
    for size in set(member.sizes):
        window, prefix = size
        inside = (*((Window(window),) if window else ()), *((Prefix(prefix),) if prefix else ()))
        if not inside:
            # A head that reads nothing: no tile has a pair of a window that ends before its own key.
            nothing = pattern_tiles((Pattern((Window(1),)),), reading)[0] & False
            found[size] = (nothing, nothing)
        elif at_end:
            sets = (Pattern(inside),)
            kept = Kept(fingerprint(sets), sets)
            some, every = kept_look(kept, reading.q.shape[2], reading.k.shape[2], device=reading.q.device)
            batch = (reading.q.shape[0], *some.shape[1:])
            found[size] = (some.expand(batch), every.expand(batch))
        else:
            found[size] = pattern_tiles((Pattern(inside),), reading)
    some, every = (torch.cat([found[size][which] for size in member.sizes], dim=1) for which in (0, 1))
    return some, every


@functools.lru_cache(maxsize=KEPT)
def kept_look(kept: Kept, queries: int, keys: int, *, device: torch.device) -> tuple[Tensor, Tensor]:
    """What `look` finds for the last `queries` of `keys` keys."""
    position = torch.arange(keys - queries, keys, device=device, dtype=torch.int32)[None]
    return look(kept.sets, position, torch.zeros_like(position), keys)


def pattern_tiles(patterns: tuple[KeySet, ...], reading: Reading) -> tuple[Tensor, Tensor]:
    """The tiles of patterns where the reading's queries stand."""
    return look(patterns, reading.position, reading.start, reading.k.shape[2])


def look(patterns: tuple[KeySet, ...], position: Tensor, start: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """bool [B, 1, R, C] twice: tiles in which some pairs are allowed, and in which all are known to be."""
    spans = [spans_of(pattern, position, start) for pattern in patterns]
    if position.shape[1] and all(spans):
        return tiles_of_spans([span for found in spans if found is not None for span in found], keys, TILE)
    batch, queries = position.shape
    rows, columns = -(-queries // TILE), -(-keys // TILE)
    at_once = max(1, PAIRS_AT_A_TIME // max(1, batch * TILE * columns * TILE))
    row = torch.arange(batch, device=position.device)[:, None, None]
    key = torch.arange(keys, device=position.device)[None, None, :]
    some, every = [], []
    for first in range(0, rows, at_once):
        begin, end = first * TILE, min(queries, (first + at_once) * TILE)
        query = torch.arange(begin, end, device=position.device)[None, :, None]
        pairs = Pair(row, torch.zeros_like(row), query, key, position[:, begin:end, None], start[:, begin:end, None])
        allowed = patterns[0].allows(pairs)
        for pattern in patterns[1:]:
            allowed = allowed | pattern.allows(pairs)
        allowed = allowed.expand(batch, end - begin, keys)
        # Padding counts as not allowed: a tile at the border is never full, and each of its pairs is asked.
        allowed = F.pad(allowed, (0, columns * TILE - keys, 0, -(end - begin) % TILE))
        allowed = allowed.view(batch, -1, TILE, columns, TILE)
        some.append(allowed.any(dim=4).any(dim=2))
        every.append(allowed.all(dim=4).all(dim=2))
    return torch.cat(some, dim=1)[:, None], torch.cat(every, dim=1)[:, None]


def selected_tiles(selected: Selected, reading: Reading) -> Tensor:
    """bool [B, H, R, C]: tiles with a key that one of their queries selected."""
    keys = reading.k.shape[2]
    batch, heads, queries, _ = selected.keys.shape
    rows, columns = -(-queries // TILE), -(-keys // TILE)
    length = 1 if selected.own is None else selected.own.length
    touched = torch.zeros(batch, heads, rows, columns + 1, dtype=torch.bool, device=selected.keys.device)
    row = torch.arange(queries, device=selected.keys.device) // TILE
    # A selected block may span several tiles: look at every TILE-th key of it, and at its last.
    for offset in {*range(0, length, TILE), length - 1}:
        # What was not selected is entered in a column that is cut off again.
        column = torch.where(selected.keys < keys, (selected.keys + offset) // TILE, columns).clamp(max=columns)
        cell = (row[:, None] * (columns + 1) + column).flatten(2)  # [B, H, T P]
        touched = touched.flatten(2).scatter(2, cell.long(), True).view_as(touched)
    return touched[..., :columns]


def list_tiles(touched: Tensor, covered: Tensor | None, *, backward: bool) -> Tiles:
    """Lists of the tiles that are read [B, H, R, C], those that are read whole apart."""
    rows, columns = touched.shape[2:]
    # torch.compile specializes on sizes of 1; an empty tile more costs nothing.
    margin = (0, max(0, 2 - columns), 0, max(0, 2 - rows))
    touched = F.pad(touched, margin)
    covered = torch.zeros_like(touched) if covered is None else F.pad(covered, margin)
    partial = touched & ~covered
    by_column = None
    if backward:
        by_column = (*ordered(partial.mT), *ordered(covered.mT))
    return Tiles(*ordered(partial), *ordered(covered), columns=by_column)


def ordered(cells: Tensor) -> tuple[Tensor, Tensor]:
    """How many cells of each row [B, H, R] are set, and all columns [B, H, R, C], the set ones first and ascending."""
    # Stable, so that the columns of set cells stay in ascending order.
    order = cells.int().argsort(dim=-1, descending=True, stable=True)
    return cells.sum(dim=-1, dtype=torch.int32), order.int().contiguous()
