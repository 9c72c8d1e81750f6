"""The divergence that trains an indexer: how far its distribution over the chosen keys is from the attention's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from varifocal.attention.precision import wide
from varifocal.equations.branches import Indexer, TopK
from varifocal.equations.layout import Layout
from varifocal.kernels.native import library
from varifocal.kernels.native.indexer import selection_divergence

QUERIES_AT_A_TIME = 256
"""Bounds what is gathered at once to H x 256 x K rows of keys."""


def indexer_divergence(
    q: Tensor,
    k: Tensor,
    indexer: Indexer,
    selected: Tensor,
    top_k: TopK,
    layout: Layout,
    *,
    backend: str = "auto",
) -> Tensor:
    """Mean over queries and heads of KL(attention || indexer), both as softmax over the keys that are read.

    In the native kernels the gradients are formed together with the divergence: what its attentions would keep for the
    backward pass is more than all else that a layer keeps.

    Args:
        q, k: queries [B, H, T, D] and keys [B, G, S, D]; the attention is the target and gets no gradient.
        indexer: its queries [B, I, T, R] and keys [B, J, S, R].
        selected: the indices [B, H, T, K] that attend returned (first keys of blocks for select="blocks").
        top_k: the branch that selected them.
        layout: where the queries stand; padding queries do not count.
        backend: as in attend; "reference" gathers the chosen keys in plain torch.
    """
    q, k = wide(q.detach()), wide(k.detach())
    whole = top_k.select == "blocks"
    queries = ((layout.query_place >= 0).sum() * q.shape[1]).clamp(min=1)
    if backend != "reference" and native_can(q, k, indexer):

        def divergence(index_q: Tensor, index_k: Tensor) -> Tensor:
            return selection_divergence(
                q, k, index_q.repeat_interleave(q.shape[1] // index_q.shape[1], dim=1), index_k, selected,
                position=layout.position.int(), start=layout.start.int(), block=top_k.block if whole else None,
            ).sum() / queries  # fmt: skip

        if torch.compiler.is_compiling():
            return divergence(indexer.queries, indexer.keys)
        formed: Tensor = _FormedAtOnce.apply(divergence, indexer.queries, indexer.keys)  # type: ignore[no-untyped-call]
        return formed
    keys = with_whole_blocks(selected, top_k.block, layout) if whole else with_own_key(selected, layout)
    total = q.new_zeros(())
    for begin in range(0, q.shape[2], QUERIES_AT_A_TIME):
        part = slice(begin, begin + QUERIES_AT_A_TIME)
        total = total + checkpoint(
            summed_divergence,
            q[:, :, part],
            k,
            indexer.queries[:, :, part],
            indexer.keys,
            keys[:, :, part],
            use_reentrant=False,
        )
    return total / queries


class _FormedAtOnce(torch.autograd.Function):
    """A number that some tensors give, and its gradients to them, of which alone the backward pass knows."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        with torch.enable_grad():
            leaves = [one.detach().requires_grad_() for one in tensors]
            value = compute(*leaves)
            ctx.save_for_backward(*torch.autograd.grad(value, leaves))
        return value.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(one * gradient for one in ctx.saved_tensors))


def native_can(q: Tensor, k: Tensor, indexer: Indexer) -> bool:
    """Whether the native kernels can find the divergence."""
    fits = indexer.keys.shape[1] == k.shape[1] and indexer.keys.shape[-1] <= k.shape[-1]
    floats = all(x.dtype == torch.float32 and x.device.type == "cpu" for x in (q, k, indexer.queries, indexer.keys))
    return library.why_missing() is None and fits and floats


def summed_divergence(q: Tensor, k: Tensor, index_q: Tensor, index_k: Tensor, keys: Tensor) -> Tensor:
    """The divergence summed over some queries [B, H, T', D] with chosen keys [B, H, T', K], -1 for none."""
    none = keys < 0
    target = chosen_scores(q, k, keys) * q.shape[-1] ** -0.5
    target = target.masked_fill(none, float("-inf")).log_softmax(dim=-1)
    guess = chosen_scores(index_q.repeat_interleave(q.shape[1] // index_q.shape[1], dim=1), index_k, keys)
    guess = guess.masked_fill(none, float("-inf")).log_softmax(dim=-1)
    # A query that chose nothing has NaN throughout: it contributes 0, and so does each entry that was not chosen.
    none = none | none.all(dim=-1, keepdim=True)
    return F.kl_div(
        guess.masked_fill(none, 0.0), target.masked_fill(none, 0.0), reduction="none", log_target=True
    ).sum()


def chosen_scores(q: Tensor, k: Tensor, keys: Tensor) -> Tensor:
    """Dot products [B, H, T', K] of queries [B, H, T', D] with keys [B, J, S, D] at `keys` [B, H, T', K]; 0 for -1."""
    batch, heads = q.shape[:2]
    row = torch.arange(batch, device=q.device)[:, None, None, None]
    head = (torch.arange(heads, device=q.device) // (heads // k.shape[1]))[None, :, None, None]
    gathered = k[row, head, keys.clamp(min=0)].masked_fill((keys < 0)[..., None], 0.0)  # [B, H, T', K, D]
    return torch.einsum("bhtd,bhtkd->bhtk", q, gathered)


def with_own_key(selected: Tensor, layout: Layout) -> Tensor:
    """The selected keys [B, H, T, K + 1] and the query's own, where it was not selected."""
    own = torch.where(layout.query_place >= 0, layout.position, -1)[:, None, :, None].expand(*selected.shape[:3], 1)
    known = (selected == own).any(dim=-1, keepdim=True)
    return torch.cat((selected, torch.where(known, -1, own)), dim=-1)


def with_whole_blocks(first: Tensor, block: int, layout: Layout) -> Tensor:
    """All key indices [B, H, T, (K + 1) * block] of the chosen blocks and of the query's own up to the query."""
    own = layout.start + torch.div(layout.query_place, block, rounding_mode="floor") * block
    own = torch.where(layout.query_place >= 0, own, -1)[:, None, :, None].expand(*first.shape[:3], 1)
    firsts = torch.cat((first, own), dim=-1)[..., None]
    keys = torch.where(firsts >= 0, firsts + torch.arange(block, device=first.device), -1).flatten(-2)
    return torch.where(keys <= layout.position[:, None, :, None], keys, -1)
