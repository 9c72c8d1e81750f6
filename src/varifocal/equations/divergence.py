"""The divergence that trains an indexer: how far its distribution over the selected keys is from the attention's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from varifocal.equations.layout import Layout
from varifocal.equations.problem import DivergenceProblem

QUERIES_AT_A_TIME = 256
"""Bounds what is gathered at once to H x 256 x K rows of keys."""


def indexer_divergence(problem: DivergenceProblem) -> Tensor:
    """Mean over queries and heads of KL(attention || indexer), in plain torch; padding queries do not count."""
    q, k, indexer, layout = problem.q, problem.k, problem.indexer, problem.layout
    whole = problem.top_k.select == "blocks"
    selected, block = problem.selected, problem.top_k.block
    keys = with_whole_blocks(selected, block, layout) if whole else with_own_key(selected, layout)
    total = q.new_zeros(())
    for begin in range(0, q.shape[2], QUERIES_AT_A_TIME):
        part = slice(begin, begin + QUERIES_AT_A_TIME)
        # The gathered keys are the largest tensors here: the backward pass gathers them again instead of keeping them.
        total = total + checkpoint(
            summed_divergence,
            q[:, :, part],
            k,
            indexer.queries[:, :, part],
            indexer.keys,
            keys[:, :, part],
            use_reentrant=False,
        )
    return total / counted_queries(problem)


def counted_queries(problem: DivergenceProblem) -> Tensor:
    """The number of queries, over all heads, that the mean is taken over."""
    return ((problem.layout.query_place >= 0).sum() * problem.q.shape[1]).clamp(min=1)


def summed_divergence(q: Tensor, k: Tensor, index_q: Tensor, index_k: Tensor, keys: Tensor) -> Tensor:
    """The divergence summed over some queries [B, H, T', D] with selected keys [B, H, T', K], -1 for none."""
    none = keys < 0
    target = selected_scores(q, k, keys) * q.shape[-1] ** -0.5
    target = target.masked_fill(none, float("-inf")).log_softmax(dim=-1)
    guess = selected_scores(index_q.repeat_interleave(q.shape[1] // index_q.shape[1], dim=1), index_k, keys)
    guess = guess.masked_fill(none, float("-inf")).log_softmax(dim=-1)
    # A query that selected nothing has NaN throughout: it contributes 0, and so does each entry that was not selected.
    none = none | none.all(dim=-1, keepdim=True)
    return F.kl_div(
        guess.masked_fill(none, 0.0), target.masked_fill(none, 0.0), reduction="none", log_target=True
    ).sum()


def selected_scores(q: Tensor, k: Tensor, keys: Tensor) -> Tensor:
    """Dot products [B, H, T', K] of queries [B, H, T', D] with keys [B, J, S, D] at `keys` [B, H, T', K]; 0 for -1."""
    batch, heads = q.shape[:2]
    row = torch.arange(batch, device=q.device)[:, None, None, None]
    head = (torch.arange(heads, device=q.device) // (heads // k.shape[1]))[None, :, None, None]
    gathered = k[row, head, keys.clamp(min=0)].masked_fill((keys < 0)[..., None], 0.0)  # [B, H, T', K, D]
    return torch.einsum("bhtd,bhtkd->bhtk", q, gathered)


def with_own_key(selected: Tensor, layout: Layout) -> Tensor:
    """The selected keys and, where it was not selected, the query's own [B, H, T, K + 1]."""
    own = torch.where(layout.query_place >= 0, layout.position, -1)[:, None, :, None].expand(*selected.shape[:3], 1)
    known = (selected == own).any(dim=-1, keepdim=True)
    return torch.cat((selected, torch.where(known, -1, own)), dim=-1)


def with_whole_blocks(first: Tensor, block: int, layout: Layout) -> Tensor:
    """All key indices [B, H, T, (K + 1) * block] of the selected blocks and of the query's own up to the query."""
    own = layout.start + torch.div(layout.query_place, block, rounding_mode="floor") * block
    own = torch.where(layout.query_place >= 0, own, -1)[:, None, :, None].expand(*first.shape[:3], 1)
    firsts = torch.cat((first, own), dim=-1)[..., None]
    keys = torch.where(firsts >= 0, firsts + torch.arange(block, device=first.device), -1).flatten(-2)
    return torch.where(keys <= layout.position[:, None, :, None], keys, -1)
