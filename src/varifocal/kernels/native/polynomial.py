"""Polynomial attention as a scan over chunks: what lies before a chunk is one matrix, what lies in it all pairs.

    o_i = sum_{j <= i} f(a_i . b_j) v_j / sum_{j <= i} f(a_i . b_j),    f(s) = 1 + s (+ s^2 / 2) = phi(a_i) . phi(b_j)

    phi(x) = [1, x, x_d x_e / sqrt(2) for all d and e]

The state is sum phi(b_j) [v_j, 1] over the keys of the document that the chunk begins in: 1 + F + F^2 rows. Products of
chunks in torch, a head at a time; the backward pass repeats a head, and keeps the states of one head alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from varifocal.equations.layout import Layout

CHUNK = 256
"""Keys whose pairs are written out: for features of 128 the products with a state cost as many keys or more."""
FEW = 16
"""Queries that read the keys themselves."""


def attend_polynomial(queries: Tensor, keys: Tensor, v: Tensor, *, order: int, layout: Layout) -> Tensor:
    """Output [B, H, T, D] float32, for queries [B, H, T, F], keys [B, G, S, F] and values [B, G, S, D]."""
    batch, heads = queries.shape[:2]
    groups = heads // max(keys.shape[1], 1)
    if queries.shape[2] <= FEW:
        return attend_few(queries, keys, v, order=order, layout=layout)
    rows = []
    for row in range(batch):
        found = []
        for head in range(heads):
            given = (queries[row, head].float(), keys[row, head // groups].float(), v[row, head // groups].float())
            places = layout.position[row], layout.start[row], layout.key_start[row]
            found.append(checkpointed(scan, *given, *places, order))
        rows.append(torch.stack(found))
    return torch.stack(rows) if rows else v.new_zeros(*queries.shape[:3], v.shape[3], dtype=torch.float32)


def attend_few(queries: Tensor, keys: Tensor, v: Tensor, *, order: int, layout: Layout) -> Tensor:
    """All pairs of a few queries: what building a state costs would be spent on them alone."""
    batch, heads, count, width = queries.shape
    groups = heads // max(keys.shape[1], 1)
    padding = (layout.key_start >= layout.keys)[:, None, :, None]
    keys, v = keys.float().masked_fill(padding, 0.0), v.float().masked_fill(padding, 0.0)
    blind = (layout.start > layout.position)[:, None, :, None]
    asked = queries.float().masked_fill(blind, 0.0).view(batch, keys.shape[1], groups * count, width)
    weights = polynomial(asked @ keys.mT, order).view(batch, heads, count, layout.keys)
    weights = weights * layout.visible()[:, None]
    total = (weights.view(batch, keys.shape[1], groups * count, layout.keys) @ v).view(batch, heads, count, v.shape[3])
    return total / away_from_0(weights.sum(dim=-1, keepdim=True))


def scan(
    queries: Tensor, keys: Tensor, v: Tensor, position: Tensor, start: Tensor, key_start: Tensor, order: int
) -> Tensor:
    """The output [T, D] of one head: queries in any order, keys in that of the text."""
    length = keys.shape[0]
    padding = (key_start >= length)[:, None]
    # Padding may hold anything, even NaN.
    keys = keys.masked_fill(padding, 0.0)
    values = torch.cat((v.masked_fill(padding, 0.0), torch.ones_like(v[:, :1]).masked_fill(padding, 0.0)), dim=1)
    queries = queries.masked_fill((start > position)[:, None], 0.0)
    output = torch.zeros(queries.shape[0], v.shape[1])
    # All parts at once: the gradient of each slice by itself would be as long as the text.
    key_parts, value_parts = torch.split(keys, CHUNK), torch.split(values, CHUNK)
    in_order = torch.equal(position, torch.arange(length))
    query_parts = torch.split(queries, CHUNK) if in_order else ()
    places, made = [], []
    state: Tensor | None = None
    document = -1
    for number, begin in enumerate(range(0, length, CHUNK)):
        end = min(begin + CHUNK, length)
        if in_order:
            asking = torch.arange(begin, end)
        else:
            asking = ((position >= begin) & (position < end) & (start <= position)).nonzero().flatten()
        if len(asking):
            index = torch.arange(begin, end)
            read = (index <= position[asking, None]) & (index >= start[asking, None])
            far = (start[asking] < begin)[:, None]
            asked = query_parts[number] if in_order else queries[asking]
            made.append(checkpointed(chunk, asked, key_parts[number], value_parts[number], read, far, state, order))
            places.append(asking)
        last = int(key_start[end - 1])
        if end < length and last < length:
            # The state is that of the document in which the next chunk begins.
            own = (key_start[begin:end] == last)[:, None]
            kept = state if last == document else None
            state = checkpointed(add, kept, key_parts[number], value_parts[number] * own, order)
            document = last
    if in_order and made:
        return torch.cat(made)
    return output.index_copy(0, torch.cat(places), torch.cat(made)) if made else output


def checkpointed(function: Callable[..., Tensor], *given: Any) -> Tensor:
    """Run once more in the backward pass, which keeps the arguments alone."""
    if torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in given):
        return checkpoint(function, *given, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
    return function(*given)


def chunk(
    queries: Tensor, keys: Tensor, values: Tensor, read: Tensor, far: Tensor, state: Tensor | None, order: int
) -> Tensor:
    """The output of some queries [t, F]: on the keys of their chunk where `read` [t, n], on the state where `far`."""
    weights = polynomial(queries @ keys.mT, order) * read
    total = weights @ values
    if state is not None:
        total = total + (features(queries, order) @ state) * far
    return total[:, :-1] / away_from_0(total[:, -1:])


def add(state: Tensor | None, keys: Tensor, values: Tensor, order: int) -> Tensor:
    """The state with the keys of a chunk."""
    added = features(keys, order).mT @ values
    return added if state is None else state + added


def features(x: Tensor, order: int) -> Tensor:
    """phi(x) [n, 1 + F (+ F^2)] of x [n, F]."""
    parts = [torch.ones_like(x[:, :1]), x]
    if order == 2:
        parts.append((x[:, :, None] * x[:, None, :]).flatten(1) * 0.5**0.5)
    return torch.cat(parts, dim=1)


def polynomial(s: Tensor, order: int) -> Tensor:
    """f(s)."""
    return 1 + s if order == 1 else 1 + s + s * s / 2


def away_from_0(total: Tensor) -> Tensor:
    """A sum of weights to divide by."""
    return torch.where(total.abs() < 1e-6, 1e-6, total)
