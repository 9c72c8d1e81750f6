"""How far predicted scores are from the true ones, over every pair that a query can see, in work linear in the text."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from varifocal.equations.layout import Layout

CHUNK = 256
"""Keys whose pairs are written out; those before them are summed up in one matrix."""


def mean_squared_product(queries: Tensor, keys: Tensor, layout: Layout) -> Tensor:
    """The mean of (a_i . b_j)^2 over heads and all pairs j <= i of a document, for a [B, H, T, F] and b [B, G, S, F].

    The squares of the keys before a chunk sum up to a_i^T (sum b_j b_j^T) a_i. With a = [q / sqrt(D), -q'] and
    b = [k, k'] it is the mean of (s - s')^2 for scores s = q.k / sqrt(D) and their predictions s' = q'.k'.
    """
    padding = (layout.key_start >= layout.keys)[:, None, :, None]
    # Padding may hold anything, even NaN.
    keys = keys.masked_fill(padding, 0.0)
    queries = queries.masked_fill((layout.query_place < 0)[:, None, :, None], 0.0)
    shared = queries.unflatten(1, (keys.shape[1], queries.shape[1] // max(keys.shape[1], 1)))  # type: ignore[no-untyped-call]  # [B, G, H / G, T, F]
    total = queries.new_zeros(())
    for row in range(queries.shape[0]):
        total = total + sum_of_row(shared[row], keys[row], layout, row)
    pairs = (layout.query_place + 1).clamp(min=0).sum() * queries.shape[1]
    return total / pairs.clamp(min=1)


def sum_of_row(queries: Tensor, keys: Tensor, layout: Layout, row: int) -> Tensor:
    """The sum of the squares of one row: queries [G, R, T, F], keys [G, S, F]."""
    position, start, key_start = layout.position[row], layout.start[row], layout.key_start[row]
    total, length = queries.new_zeros(()), keys.shape[1]
    state, document = queries.new_zeros(keys.shape[0], keys.shape[2], keys.shape[2]), -1
    for begin in range(0, length, CHUNK):
        end = min(begin + CHUNK, length)
        asking = ((position >= begin) & (position < end) & (start <= position)).nonzero().flatten()
        if len(asking):
            index = torch.arange(begin, end, device=keys.device)
            read = (index <= position[asking, None]) & (index >= start[asking, None])
            far = (start[asking] < begin)[:, None]
            given = queries[:, :, asking], keys[:, begin:end], read, far, state
            # Once more in the backward pass, which keeps the arguments alone.
            part: Tensor = checkpoint(sum_of_chunk, *given, use_reentrant=False, preserve_rng_state=False)
            total = total + part
        last = int(key_start[end - 1])
        if end < length and last < length:
            # The state is that of the document in which the next chunk begins.
            own = keys[:, begin:end] * (key_start[begin:end] == last)[:, None]
            state = (state if last == document else torch.zeros_like(state)) + own.mT @ own
            document = last
    return total


def sum_of_chunk(queries: Tensor, keys: Tensor, read: Tensor, far: Tensor, state: Tensor) -> Tensor:
    """The squares of queries [G, R, t, F]: with their chunk's keys where `read`, and with those before if `far`."""
    near = (queries @ keys.mT[:, None]) * read
    before = queries * far
    return near.square().sum() + ((before @ state[:, None]) * before).sum()
