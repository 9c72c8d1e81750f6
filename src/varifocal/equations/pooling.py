"""Means of blocks and summaries of segments, in plain torch: what a memory keeps while tokens arrive."""

from __future__ import annotations

import torch
from torch import Tensor

from varifocal.equations.problem import PoolingProblem, SummaryProblem, accumulation_dtype


@torch.no_grad()
def pool_keys(problem: PoolingProblem) -> None:
    """Add new keys to the means of their blocks; the first key of a block starts its mean anew."""
    means, layout, block = problem.means, problem.layout, problem.block
    place, position = layout.query_place, layout.position
    within = place % block
    # Padding goes to a row after the last, which is dropped.
    row = torch.where(place >= 0, torch.div(position - within, block, rounding_mode="floor"), means.shape[2])
    begun = torch.where(within == 0, row, means.shape[2])  # [B, T]
    fresh = torch.ones(means.shape[0], means.shape[2] + 1, device=means.device).scatter(1, begun, 0.0)[:, :-1]
    index = row[:, None, :, None].expand(-1, *means.shape[1:2], -1, means.shape[3])
    added = torch.cat((means * fresh[:, None, :, None], torch.zeros_like(means[:, :, :1])), dim=2)
    means.copy_(added.scatter_add(2, index, problem.keys.float() / block)[:, :, :-1])


def summarize(problem: SummaryProblem) -> Tensor:
    """Summary key and value [B, H, N, 2 D] of each segment."""
    dtype, groups = accumulation_dtype(problem.q.dtype), problem.q.shape[1] // problem.k.shape[1]
    shape = (problem.k.shape[2] // problem.length, problem.length)
    q, k, v = (
        part.to(dtype).reshape(*part.shape[:2], *shape, part.shape[3]) for part in (problem.q, problem.k, problem.v)
    )
    k, v = (part.repeat_interleave(groups, dim=1) for part in (k, v))  # [B, H, N, L, D]
    key, query = k.amax(dim=3), q.amax(dim=3)
    scores = torch.einsum("bhnd,bhnld->bhnl", query, k) * problem.q.shape[-1] ** -0.5
    value = torch.einsum("bhnl,bhnld->bhnd", scores.softmax(dim=-1), v)
    return torch.cat((key, value), dim=-1).to(problem.k.dtype)
