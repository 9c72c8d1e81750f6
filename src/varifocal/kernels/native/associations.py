"""Segments and a matrix of associations before them, as products of segments in torch.

    o_i = phi(q_i) M_s / phi(q_i) z_s,    M_(s+1) = M_s + sum phi(k_j) u_j^T,    z_(s+1) = z_s + sum phi(k_j)

for the queries and keys of segment s. M and z stand side by side in one matrix, so that each step is one product for
all heads; the keys of a segment are never rated one by one. Work and memory are linear in the text: a matrix of F rows
for each segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from varifocal.equations.branches.compressed import Associations, Compressed, learned, with_ones
from varifocal.equations.layout import Layout


class Segment(NamedTuple):
    """Tokens of one segment of a document."""

    document: int
    """Where the document begins, as in a Layout."""
    begin: int
    """The place of its first token in the document: the segment's own begin."""
    first: int
    """The index of its first key that is kept."""
    end: int
    """The index after its last key."""


def own_segment(layout: Layout, length: int) -> Layout:
    """The layout in which every segment of `length` keys is a document of its own, made once for all layers."""
    name = f"segments of {length}"
    if name in layout.derived:
        found: Layout = layout.derived[name]
        return found
    place = layout.query_place
    begin = (layout.position - place.clamp(min=0) % length).clamp(min=0)
    made = Layout(
        position=layout.position, start=torch.where(place < 0, layout.keys, begin), key_start=layout.key_start
    )
    layout.derived[name] = made
    return made


def read_associations(branch: Compressed, v: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, D] and the log of the sum of weights [B, H, T], float32; values v [B, G, S, D]."""
    queries, keys, past = branch.queries.float(), branch.keys.float(), branch.past
    values = with_ones(v.float())
    if not layout.one_document:
        # Padding may hold anything, even NaN.
        padding = (layout.key_start >= layout.keys)[:, None, :, None]
        keys, values = keys.masked_fill(padding, 0.0), values.masked_fill(padding, 0.0)
        queries = queries.masked_fill((layout.query_place < 0)[:, None, :, None], 0.0)
    if queries.numel() == 0:
        return queries[..., :1].expand(*queries.shape[:3], v.shape[3]), queries.sum(dim=-1)
    if is_uniform(layout, past):
        total = read_rows(branch, queries, keys, values, layout, past, row=0)
    else:
        rows = []
        for row in range(queries.shape[0]):
            a, b, c = (one[row : row + 1] for one in (queries, keys, values))
            rows.append(read_rows(branch, a, b, c, layout, part(past, row), row=row))
        total = torch.cat(rows)
    weight = total[..., -1:]
    nothing = weight == 0
    output = total[..., :-1] / weight.masked_fill(nothing, 1.0)
    return output, weight.detach().log().squeeze(-1)


def is_uniform(layout: Layout, past: Associations | None) -> bool:
    """Whether all rows of the batch are laid out alike."""
    told = [] if past is None else [past.start, past.folded]
    if not layout.one_document:
        told += [layout.position, layout.start, layout.key_start]
    return all(bool((one == one[:1]).all()) for one in told)


def part(past: Associations | None, row: int) -> Associations | None:
    """The associations of one row."""
    if past is None:
        return None
    return Associations(*(one[row : row + 1] for one in (past.matrix, past.norm, past.start, past.folded)))


def segments(layout: Layout, row: int, length: int) -> Iterator[Segment]:
    """The segments of the kept keys of a row, in the order of the text."""
    starts, counts = torch.unique_consecutive(layout.key_start[row], return_counts=True)
    first = 0
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        end = first + count
        if start < layout.keys:
            for number in range((first - start) // length, (end - 1 - start) // length + 1):
                begin = start + number * length
                yield Segment(start, number * length, max(first, begin), min(end, begin + length))
        first = end


def read_rows(
    branch: Compressed,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: Layout,
    past: Associations | None,
    *,
    row: int,
) -> Tensor:
    """phi(q) [M, z] [B', H, T, D + 1] for rows that are laid out like row `row`; 0 where there is no memory."""
    batch, heads, asking, width = queries.shape
    groups = heads // max(keys.shape[1], 1)
    # Query heads that share a key head read one matrix: [B', G, H / G, T, F].
    shared = queries.view(batch, keys.shape[1], groups, asking, width)
    position, start = layout.position[row], layout.start[row]
    nothing = values.new_zeros(batch, keys.shape[1], groups, 1, values.shape[-1])
    state: Tensor | None = None
    document, folded = None, 0
    pieces: list[Tensor] = []
    places: list[Tensor] = []
    found_segments = list(segments(layout, row, branch.length))
    ends = [(one.first, one.end) for one in found_segments]
    gap = layout.keys - asking
    asked = [(max(first - gap, 0), max(end - gap, 0)) for first, end in ends]
    key_parts, value_parts = cut(keys, ends, dim=2), cut(values, ends, dim=2)
    query_parts = cut(shared, asked, dim=3) if layout.at_end else ()
    for number, one in enumerate(found_segments):
        if one.document != document:
            state, folded, document = None, 0, one.document
            if past is not None and int(past.start[0]) == document and (folded := int(past.folded[0])):
                state = torch.cat((past.matrix, past.norm[..., None]), dim=-1).float()
        if layout.at_end:
            index, found = torch.arange(*asked[number]), query_parts[number]
        else:
            inside = (position >= one.first) & (position < one.end) & (start == document)
            index = inside.nonzero().flatten()
            found = shared[:, :, :, index]
        if found.shape[3]:
            places.append(index)
            pieces.append(read_state(found, state) if state is not None else nothing.expand(-1, -1, -1, len(index), -1))
        if one.begin >= folded and one.end < layout.keys:
            state = learned(state, key_parts[number], value_parts[number], delta=branch.delta)
    if not pieces:
        return nothing.expand(-1, -1, -1, asking, -1).reshape(batch, heads, asking, -1)
    joined = torch.cat(pieces, dim=3)
    if joined.shape[3] == asking and layout.at_end:
        return joined.flatten(1, 2)
    whole = nothing.expand(-1, -1, -1, asking, -1).clone()
    return whole.index_copy(3, torch.cat(places), joined).flatten(1, 2)


def cut(x: Tensor, ranges: Sequence[tuple[int, int]], *, dim: int) -> tuple[Tensor, ...]:
    """The parts of x from begin to end, which come in order.

    All at once: the gradient of each slice by itself would be as long as the text.
    """
    sizes, at = [], 0
    for begin, end in ranges:
        sizes += [begin - at, end - begin]
        at = end
    parts: tuple[Tensor, ...] = torch.split(x, [*sizes, x.shape[dim] - at], dim=dim)
    return parts[1::2]


def read_state(queries: Tensor, state: Tensor) -> Tensor:
    """phi(q) [M, z] [B, G, R, t, D + 1] for queries [B, G, R, t, F] on a state [B, G, F, D + 1]."""
    batch, kv_heads, groups, asking, width = queries.shape
    found = queries.reshape(batch, kv_heads, groups * asking, width) @ state
    return found.view(batch, kv_heads, groups, asking, -1)
