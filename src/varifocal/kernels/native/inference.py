"""A mixture that nobody differentiates, traces or casts: the shortest way from its tensors to the kernel.

The operator of mixture.py does the same and more. Where a kernel reads a thousand keys for one query, what that takes
costs as much as the kernel.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import abi, library
from .arguments import (
    contiguous,
    dtype_argument,
    pointer,
    put_tensor,
    room_like,
    row_pointer,
    rows_contiguous,
    scale_per_head,
)
from .mixture import DOT, MixtureBranch, per_head, sized_call


def mixture_plainly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    branches: Sequence[MixtureBranch],
    weights: Tensor | None,
    position: Tensor,
    start: Tensor,
    scale: float,
    skip_closed: bool,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, D] and logsumexp [B, H, T, M] of branches without soft windows; as `mixture_inputs`."""
    batch, heads, queries, width = q.shape
    q, k, v, weights = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v), contiguous(weights)
    if weights is not None and weights.dtype != torch.float32:
        weights = weights.float()
    factors = scale_per_head(scale, q)
    windows = per_head([branch.window for branch in branches], heads, "window")
    prefixes = per_head([branch.prefix for branch in branches], heads, "prefix")
    output = room_like(q)
    logsumexp = torch.empty((batch, heads, queries, len(branches)), dtype=torch.float32)
    call = sized_call(
        batch, heads, k.shape[1], queries, k.shape[2], width,
        branch_count=len(branches), dtype=dtype_argument(q), threads=torch.get_num_threads(),
        skip_closed=skip_closed and weights is not None, score=DOT,
    )  # fmt: skip
    put_tensor(call, abi.Mixture.q, q)
    put_tensor(call, abi.Mixture.k, k)
    put_tensor(call, abi.Mixture.v, v)
    put_tensor(call, abi.Mixture.out, output)
    call.scale, call.position, call.start = pointer(factors), pointer(position), pointer(start)
    call.weights, call.logsumexp = pointer(weights), pointer(logsumexp)
    for m in range(len(branches)):
        abi.put_branch(
            call, m, window=row_pointer(windows, m) or 0, prefix=row_pointer(prefixes, m) or 0,
            width=0, limit=0, edge=0.0,
        )  # fmt: skip
    library.call("mixture_forward", call)
    return output, logsumexp
