"""What a top-k reads: the best keys or blocks of each query, a few queries at a time. A selection has no gradient.

The k-th best score of a query is its threshold. What lies above it is selected. Of what equals it, the lowest indices
fill up the rest: exactly k are selected, whatever the ties.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from varifocal.equations.branches import TopK
from varifocal.equations.layout import Layout
from varifocal.equations.problem import accumulation_dtype
from varifocal.equations.scores import Pairs, Score
from varifocal.kernels.flex.key_sets import Selected
from varifocal.kernels.flex.whole_blocks import earlier, first_keys, gather_blocks

PAIRS_AT_A_TIME = 1 << 23
"""Bounds the scores that exist at once."""
NONE = torch.iinfo(torch.int32).max
"""Follows the last selected key in a list; higher than any index."""

Rank = Callable[[slice], Tensor]
"""Scores [B, I, T', N] of some queries, minus infinity for what they may not select."""


def select(top_k: TopK, q: Tensor, k: Tensor, score: Score, layout: Layout, means: Tensor | None) -> Selected:
    """What every query and head selects, from q [B, H, T, D], k [B, G, S, D] and a prepared score.

    `means` [B, G, N, D] are those of the blocks of keys (or of the indexer's), if a memory keeps them.
    """
    with torch.no_grad():
        queries, keys = q, k
        if top_k.indexer is not None:
            queries, keys = top_k.indexer.queries, top_k.indexer.keys
        if top_k.select == "exact":
            found = select_keys(top_k, queries, keys, score, layout)
        else:
            found = select_blocks(top_k, queries, keys, score, layout, means)
        # An indexer may rank once for several query heads; each of these reads the same selection.
        found = found.repeat_interleave(q.shape[1] // max(1, found.shape[1]), dim=1)
        return Selected(found, top_k.own if top_k.select == "blocks" else None)


def listed(selected: Selected, top_k: TopK, keys: int) -> Tensor:
    """A selection as attend returns it: int32 [B, H, T, K], -1 after the last."""
    found = selected.keys[..., : capacity(top_k, keys)]
    return torch.where(found == NONE, -1, found)


def capacity(top_k: TopK, keys: int) -> int:
    """The most that any query of a row of `keys` keys selects."""
    return top_k.most_keys(keys) if top_k.select == "exact" else top_k.most_blocks(keys)


def select_keys(top_k: TopK, q: Tensor, k: Tensor, score: Score, layout: Layout) -> Tensor:
    """int32 [B, I, T, P]: the best keys of each query, ascending, then NONE."""
    index = torch.arange(layout.keys, device=q.device)

    def rank(part: slice) -> Tensor:
        products = multiply(q[:, :, part], k)
        scores = products if top_k.indexer is not None else rated(score, products, q.shape[-1], layout, part)
        start, position = layout.start[:, None, part, None], layout.position[:, None, part, None]
        return scores.masked_fill((index < start) | (index > position), float("-inf"))

    budget = top_k.keys_per_query(layout.query_place)
    return best(rank, budget, candidates=layout.keys, heads=q.shape[1], most=capacity(top_k, layout.keys))


def select_blocks(top_k: TopK, q: Tensor, k: Tensor, score: Score, layout: Layout, means: Tensor | None) -> Tensor:
    """int32 [B, I, T, P]: the first keys of the best complete blocks before each query's own, ascending, then NONE."""
    first = first_keys(layout, top_k.block)  # [B, N]
    slots = first.shape[1]
    if means is not None:
        pooled = means[:, :, :slots].to(accumulation_dtype(q.dtype))
    else:
        pooled = gather_blocks(k.to(accumulation_dtype(k.dtype)), first, top_k.block).mean(dim=3)

    def rank(part: slice) -> Tensor:
        products = multiply(q[:, :, part], pooled)
        scores = products if top_k.indexer is not None else score.rate_blocks(products, head_width=q.shape[-1])
        open_to = earlier(first, layout.position[:, part], layout.start[:, part], top_k.block)
        return scores.masked_fill(~open_to[:, None], float("-inf"))

    budget = top_k.blocks_per_query(layout.query_place)
    selected = best(rank, budget, candidates=slots, heads=q.shape[1], most=capacity(top_k, layout.keys))
    if not slots:
        return selected
    # NONE would be out of range for gather; its place holds anything, and NONE again in the next line.
    found = first[:, None, None].expand(*selected.shape[:3], -1).gather(3, selected.clamp(max=slots - 1).long())
    return torch.where(selected == NONE, NONE, found).int()


def best(rank: Rank, budget: Tensor, *, candidates: int, heads: int, most: int) -> Tensor:
    """int32 [B, I, T, P]: the `budget` [B, T] best of all candidates for each query, ascending, then NONE."""
    batch, queries = budget.shape
    # A row may hold fewer complete blocks than the budget allows.
    most = min(most, candidates)
    listed = torch.full((batch, heads, queries, list_width(most)), NONE, dtype=torch.int32, device=budget.device)
    if not most:
        return listed
    for part in parts(queries, batch * heads * candidates):
        listed[:, :, part, :most] = best_of(rank(part), budget[:, None, part, None], most)
    return listed


def best_of(scores: Tensor, budget: Tensor, most: int) -> Tensor:
    """int32 [B, I, T', most]: the indices of the `budget` [B, 1, T', 1] highest scores [B, I, T', N], then NONE."""
    nothing = float("-inf")
    highest = scores.topk(most, dim=-1).values
    # A budget of 0, that of padding, looks at the best score here; `budget > 0` takes it out again below.
    threshold = highest.gather(-1, (budget - 1).clamp(min=0).expand(*scores.shape[:3], 1))
    above = scores > threshold
    # Where fewer than k keys may be read the threshold is minus infinity, and masked keys must not count as equal.
    equal = (scores == threshold) & (scores > nothing)
    room = budget - above.sum(dim=-1, keepdim=True)
    selected = (above | (equal & (equal.cumsum(dim=-1, dtype=torch.int32) <= room))) & (budget > 0)
    index = torch.arange(scores.shape[-1], device=scores.device, dtype=torch.int32)
    # torch.sort would order all N entries; the lowest `most` are enough, since NONE is higher than any index.
    ascending = torch.where(selected, index, NONE).topk(most, dim=-1, largest=False)
    return ascending.values


def list_width(most: int) -> int:
    """A width for lists of up to `most` entries: 8, 64, 512, ...; kernels do not change with every length."""
    width = 8
    while width < most:
        width *= 8
    return width


def parts(queries: int, pairs_per_query: int) -> Iterator[slice]:
    """Slices of the queries, each with a bounded number of pairs."""
    at_once = max(1, PAIRS_AT_A_TIME // max(1, pairs_per_query))
    return (slice(begin, begin + at_once) for begin in range(0, queries, at_once))


def multiply(q: Tensor, k: Tensor) -> Tensor:
    """Dot products [B, H, T, N] of q [B, H, T, D] and k [B, G, N, D] in float32 or wider; no key head is repeated."""
    q, k = q.to(accumulation_dtype(q.dtype)), k.to(accumulation_dtype(k.dtype))
    together = q.shape[1] // k.shape[1] * q.shape[2]
    grouped = q.reshape(q.shape[0], k.shape[1], together, q.shape[3])  # [B, G, H / G T, D]
    return (grouped @ k.mT).view(*q.shape[:3], k.shape[2])


def rated(score: Score, products: Tensor, head_width: int, layout: Layout, part: slice) -> Tensor:
    """Scores of some queries from their dot products."""
    start, index = layout.start[:, None, part, None], torch.arange(layout.keys, device=products.device)
    pairs = Pairs(layout.query_place[:, None, part, None], index - start, head_width)
    return score.of_queries(part).rate(products, pairs)
