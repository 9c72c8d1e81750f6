"""Vectors added to values by their distance, beside a mixture that reads every key or a window.

    sum_j p_ij b_min(x, N - 1) = sum_{x < N - 1} p_ix b_x + (1 - sum_{x < N - 1} p_ix) b_{N - 1}

Only the probabilities of the N - 1 nearest keys are needed one by one, and the mixture's logsumexp turns their scores
into probabilities: O(n N D) beside the mixture, in plain torch, some queries at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from varifocal.equations.layout import Layout
from varifocal.kernels.native.scattered import take

QUERIES_AT_A_TIME = 1024
"""Bounds what is gathered at once to G x 1024 x N rows of keys."""


def add_relative_values(
    output: Tensor,
    logsumexp: Tensor,
    *,
    q: Tensor,
    k: Tensor,
    rows: Tensor,
    scale: Tensor | float,
    table: Tensor | None,
    window: int,
    layout: Layout,
) -> Tensor:
    """The output [B, H, T, D] of a softmax over the last `window` keys, with rows [N, D] added to its values.

    The logsumexp [B, H, T] carries a gradient; `table` [H, M] or [B, H, T, M] is the score's bias by distance.
    """
    parts = []
    for begin in range(0, q.shape[2], QUERIES_AT_A_TIME):
        part = slice(begin, begin + QUERIES_AT_A_TIME)
        here = table[:, :, part] if table is not None and table.ndim == 4 else table
        given = (q[:, :, part], k, logsumexp[:, :, part], rows, torch.as_tensor(scale), here)
        places = layout.position[:, part], layout.start[:, part], window
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # The gathered keys are the largest tensors here: the backward gathers them again.
            parts.append(checkpoint(relative_part, *given, *places, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(relative_part(*given, *places))
    added = torch.cat(parts, dim=2) if parts else torch.zeros_like(output)
    return output + added.to(output.dtype)


def relative_part(
    q: Tensor,
    k: Tensor,
    logsumexp: Tensor,
    rows: Tensor,
    scale: Tensor,
    table: Tensor | None,
    position: Tensor,
    start: Tensor,
    window: int,
) -> Tensor:
    """What the rows add for some queries [B, H, T', D]."""
    batch, heads, queries, width = q.shape
    near = rows.shape[0] - 1
    distance = torch.arange(near)
    index = position[..., None] - distance  # [B, T', N - 1]
    read = (index >= start[..., None]) & (distance < window)
    keys = take(k, index.clamp(min=0).flatten(1)).view(batch, k.shape[1], queries, near, width)
    keys = keys.masked_fill(~read[:, None, ..., None], 0.0).float()
    grouped = q.float().view(batch, k.shape[1], heads // k.shape[1], queries, width)
    scores = torch.einsum("bgrtd,bgtxd->bgrtx", grouped, keys).flatten(1, 2)  # [B, H, T', N - 1]
    scores = scores * (scale.view(-1, 1, 1) if scale.ndim else scale)
    if table is not None:
        last = table.shape[-1] - 1
        bias = table.float()[..., distance.clamp(max=last)]
        scores = scores + (bias[:, None] if table.ndim == 2 else bias)
    nothing = logsumexp == float("-inf")
    scores = scores - logsumexp.masked_fill(nothing, 0.0)[..., None]
    none = ~read[:, None] | nothing[..., None]
    weights = scores.masked_fill(none, float("-inf")).exp()
    rest = (1.0 - weights.sum(dim=-1, keepdim=True)).masked_fill(nothing[..., None], 0.0)
    return torch.cat((weights, rest), dim=-1) @ rows.float()
