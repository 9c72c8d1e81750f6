"""The divergence that trains an indexer, from attention over the selected keys: no selected key is ever gathered.

With the attention p over the keys that a query selected, and the indexer's scores r_j = a . b_j over the same keys:

    KL(p || softmax(r)) = lse(r) - a . sum_j p_j b_j + (sum_j p_j s_j - lse(s))

Three attentions over the selection: one gives lse(r), one mixes b by p, one mixes k by p for sum_j p_j s_j.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from varifocal.equations.divergence import counted_queries
from varifocal.equations.problem import DivergenceProblem

from .arguments import scale_per_head
from .once import differentiable_once
from .selected import attend_selected


def why_no_divergence(problem: DivergenceProblem) -> str | None:
    """Why the kernels cannot find the divergence, as the end of a sentence; None if they can."""
    q, k, indexer = problem.q, problem.k, problem.indexer
    for name, x in (("q", q), ("k", k), ("the indexer's queries", indexer.queries), ("its keys", indexer.keys)):
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return f"finds an indexer's divergence from float32 tensors on a cpu, got {name} {x.dtype} on {x.device}"
    if indexer.keys.shape[1] != k.shape[1] or indexer.keys.shape[-1] > k.shape[-1]:
        return (
            f"finds the divergence of an indexer with a key head for each of the {k.shape[1]} key heads, at most "
            f"{k.shape[-1]} wide, got {indexer.keys.shape[1]} heads of width {indexer.keys.shape[-1]}"
        )
    return None


def mean_divergence(problem: DivergenceProblem) -> Tensor:
    """Mean over queries and heads of KL(attention || indexer).

    The gradients are formed together with the divergence: what its attentions would keep for the backward pass is more
    than all else that a layer keeps.
    """
    q, k, indexer, top_k = problem.q, problem.k, problem.indexer, problem.top_k
    position, start = problem.layout.ranges
    queries = counted_queries(problem)

    def divergence(index_q: Tensor, index_k: Tensor) -> Tensor:
        return selection_divergence(
            q, k, index_q.repeat_interleave(q.shape[1] // index_q.shape[1], dim=1), index_k, problem.selected,
            position=position, start=start, block=top_k.block if top_k.select == "blocks" else None,
        ).sum() / queries  # fmt: skip

    if torch.compiler.is_compiling():
        return divergence(indexer.queries, indexer.keys)
    formed: Tensor = _FormedAtOnce.apply(divergence, indexer.queries, indexer.keys)  # type: ignore[no-untyped-call]
    return formed


class _FormedAtOnce(torch.autograd.Function):
    """A number that some tensors give, and its gradients to them, of which alone the backward pass knows."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        with torch.enable_grad():
            leaves = [one.detach().requires_grad_() for one in tensors]
            value = compute(*leaves)
            ctx.save_for_backward(*torch.autograd.grad(value, leaves), *tensors)
        return value.detach()

    @staticmethod
    @differentiable_once("an indexer's divergence")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Asked for once: a checkpoint computes them anew for each time.
        saved = ctx.saved_tensors
        return (None, *(one * gradient for one in saved[: len(saved) // 2]))


def selection_divergence(
    q: Tensor,
    k: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    selected: Tensor,
    *,
    position: Tensor,
    start: Tensor,
    block: int | None,
) -> Tensor:
    """KL(attention || indexer) [B, H, T] of each query and head, 0 where nothing was selected.

    Differentiable in index_q [B, H, T, R] and index_k [B, G, S, R], R <= D; q [B, H, T, D] and k [B, G, S, D] are the
    target and get no gradient. All float32. selected, position, start and block as in attend_selected; without `block`
    the query's own key counts as selected.
    """
    q, k = q.detach(), k.detach()
    reading = {"position": position, "start": start, "block": block, "include_self": block is None}
    guess = attend_selected(index_q, index_k, index_k.detach(), selected, scale=1.0, **reading)  # type: ignore[arg-type]
    values = functional.pad(index_k, (0, k.shape[-1] - index_k.shape[-1]))
    target = attend_selected(q, k, values, selected, **reading)  # type: ignore[arg-type]
    with torch.no_grad():
        own = attend_selected(q, k, k, selected, **reading)  # type: ignore[arg-type]
        certainty = (q * own.output).sum(-1) * scale_per_head(None, q)[:, None] - own.logsumexp
    expected = (index_q * target.output[..., : index_q.shape[-1]]).sum(-1)
    # A query that sees nothing has lse minus infinity; the mask keeps its gradient 0 as well.
    blind = (start > position)[:, None]
    return guess.logsumexp.masked_fill(blind, 0.0) - expected + certainty.masked_fill(blind, 0.0)
