"""Mixtures of windows as two torch operators: `varifocal::triton_mixture` and its backward.

Kernels are compiled for the kinds of branches, the width and type of heads, and the kind of layout; never for a length.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from varifocal.kernels.native.once import differentiable_once

from . import backward, forward, split
from .arrangement import Arrangement, Sizes, arrange, tables
from .tiles import (
    FEW_QUERIES,
    INTERPRETED,
    INTERPRETED_SHARE,
    INTERPRETED_SPLIT,
    LEAST_SHARE,
    MOST_SHARES,
    SPLIT,
    Tile,
    tile_of,
)

PLAIN, AT_END, ANYWHERE = 0, 1, 2
"""Layouts, as in rings.py."""
ROWS = 64
"""Rows of a program that works out numbers of rows."""
WIDEST = 256


def interpreted() -> bool:
    """Whether the kernels of this process run in Triton's interpreter."""
    return isinstance(forward.forward, InterpretedFunction)


def arranged(
    heads: int, window: Sequence[int], prefix: Sequence[int], limit: Sequence[int], edge: Sequence[float]
) -> Arrangement:
    """Branches from the lists that an operator takes: M numbers, or M x H."""
    parts = []
    for m, (far, soft) in enumerate(zip(limit, edge, strict=True)):
        part = slice(m * heads, (m + 1) * heads)
        parts.append(Sizes(tuple(window[part]), tuple(prefix[part]), far, soft))
    return arrange(tuple(parts))


def constants(q: Tensor, arrangement: Arrangement, position: Tensor | None, start: Tensor | None) -> dict[str, Any]:
    """What all kernels of a call are compiled for."""
    width = q.shape[3]
    return {
        "D": width,
        "DP": padded(width),
        "M": len(arrangement.order),
        "KINDS": arrangement.kinds,
        "LAYOUT": PLAIN if start is None else AT_END if position is None else ANYWHERE,
    }


def padded(width: int) -> int:
    """Channels that a kernel works with: a power of two, and no fewer than a matrix unit takes."""
    return max(16, 1 << (width - 1).bit_length())


def precision(q: Tensor) -> str:
    """How products of float32 are made: as torch.set_float32_matmul_precision says."""
    return "ieee" if q.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest" else "tf32"


def tiling(kernel: str, q: Tensor, *, documents: bool) -> Tile:
    """The tile of a kernel on q's device."""
    if interpreted():
        return INTERPRETED[kernel]
    major, minor = torch.cuda.get_device_capability(q.device)
    capability = 10 * major + minor
    return tile_of(
        kernel, width=padded(q.shape[3]), bytes_each=q.element_size(), capability=capability, documents=documents
    )


def options(tile: Tile) -> dict[str, int]:
    """A tile as a launch takes it."""
    return {"BM": tile.queries, "BN": tile.keys, "num_warps": tile.warps, "num_stages": tile.stages}


def on_device(q: Tensor) -> Any:
    """Launches go to the current device, which need not be q's."""
    return torch.cuda.device(q.device) if q.device.type == "cuda" else contextlib.nullcontext()


def rows_together(x: Tensor) -> Tensor:
    """x with a contiguous last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def room_like(x: Tensor) -> Tensor:
    """Room of x's shape, laid out as x is: heads of a transposed tensor are joined again without a copy."""
    made = torch.empty_like(x)
    return made if made.stride(-1) == 1 else made.new_empty(x.shape)


@torch.library.custom_op("varifocal::triton_mixture", mutates_args=())
def triton_mixture(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor | None,
    sink: Tensor | None,
    scale: Tensor | None,
    width: Tensor | None,
    position: Tensor | None,
    start: Tensor | None,
    seen: Tensor | None,
    factor: float,
    window: Sequence[int],
    prefix: Sequence[int],
    limit: Sequence[int],
    edge: Sequence[float],
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output [B, H, T, D], the logsumexp [B, H, T, M], and the means of branches that the backward needs.

    Args:
        q, k, v: [B, H, T, D] and [B, G, S, D], of one type.
        weights: float32 [B, H, T, M]; None for 1.
        sink: float32 [H], a logit that is in every branch's sum; None for none.
        scale: float32 [H], beside `factor`, by which dot products are multiplied; None for 1.
        width: float32 [M, B, H, T], of branches with a soft window; None if there is none.
        position: int32 [B, T]; None if the queries are the last ones.
        start: int32 [B, T]; None, with no position either, if every row is one document.
        seen: int8 [B, S], 0 for keys that nobody sees; None if all are seen.
        factor: of dot products.
        window, prefix: M times a number for each head.
        limit, edge: M numbers; an edge of 0 means no soft window.
        save: whether a backward follows.
    """
    batch, heads, queries, _ = q.shape
    out, logsumexp, means = room_for_answers(q, weights, limit, save)
    if not q.numel():
        return out, logsumexp, means
    if not k.numel():
        return out.zero_(), logsumexp.fill_(float("-inf")), means.zero_()
    arrangement = arranged(heads, window, prefix, limit, edge)
    q, k, v = rows_together(q), rows_together(k), rows_together(v)
    # The means of branches inside others are put down whether or not a backward needs them.
    kept = means if save and means.numel() else q.new_empty((len(limit) - 1, *q.shape))
    shares = shares_of(queries, k.shape[2], arrangement) if not save else 1
    if shares > 1:
        read_in_shares(
            q, k, v, weights, sink, scale, width, position, start, seen, out, kept, logsumexp,
            arrangement=arrangement, factor=factor, shares=shares,
        )  # fmt: skip
        return out, logsumexp, means
    tile = tiling("forward", q, documents=start is not None)
    with on_device(q):
        forward.forward[(triton.cdiv(queries, tile.queries), heads, batch)](
            q, k, v, weights, sink, scale, width, *tables(arrangement, q.device), position, start, seen,
            out, kept, logsumexp, *strides(q), *strides(k), *strides(v), *strides(out),
            batch, heads, k.shape[1], queries, k.shape[2], factor,
            **constants(q, arrangement, position, start), SAVE=bool(means.numel()), PRECISION=precision(q),
            **options(tile),
        )  # fmt: skip
    return out, logsumexp, means


def shares_of(queries: int, keys: int, arrangement: Arrangement) -> int:
    """Among how many programs the keys of a head are split: 1 unless few queries read many keys."""
    if queries > FEW_QUERIES or not arrangement.reads_far:
        return 1
    return min(MOST_SHARES, -(-keys // (INTERPRETED_SHARE if interpreted() else LEAST_SHARE)))


def read_in_shares(
    q: Tensor, k: Tensor, v: Tensor, weights: Tensor | None, sink: Tensor | None, scale: Tensor | None,
    width: Tensor | None, position: Tensor | None, start: Tensor | None, seen: Tensor | None,
    out: Tensor, means: Tensor, logsumexp: Tensor, *, arrangement: Arrangement, factor: float, shares: int,
) -> None:  # fmt: skip
    """What the forward kernel writes, from shares of the keys."""
    batch, heads, queries, wide = q.shape
    keys = k.shape[2]
    tile = INTERPRETED_SPLIT if interpreted() else SPLIT
    tiles = -(-keys // tile.keys)
    share = -(-tiles // shares)
    branches = len(arrangement.order)
    sums = q.new_empty((shares, branches, batch, heads, queries, wide), dtype=torch.float32)
    numbers = q.new_empty((shares, branches, 2, batch, heads, queries), dtype=torch.float32)
    compiled_for = constants(q, arrangement, position, start)
    with on_device(q):
        split.read_shares[(shares, heads, batch)](
            q, k, v, scale, width, *tables(arrangement, q.device), position, start, seen, sums, numbers,
            *strides(q), *strides(k), *strides(v), batch, heads, k.shape[1], queries, keys, share, factor,
            **compiled_for, PRECISION=precision(q), **options(tile),
        )  # fmt: skip
        compiled_for.pop("LAYOUT")
        split.join_shares[(heads, batch)](
            sums, numbers, weights, sink, out, means, logsumexp, *strides(out), batch, heads, queries, shares,
            **compiled_for, BM=tile.queries, num_warps=tile.warps,
        )  # fmt: skip


def room_for_answers(
    q: Tensor, weights: Tensor | None, limit: Sequence[int], save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, logsumexp and means; no means where the backward does without."""
    branches = len(limit)
    kept = (branches, *q.shape) if save and (weights is not None or branches > 1) else (0,)
    return room_like(q), q.new_empty((*q.shape[:3], branches), dtype=torch.float32), q.new_empty(kept)


@triton_mixture.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor | None,
    sink: Tensor | None,
    scale: Tensor | None,
    width: Tensor | None,
    position: Tensor | None,
    start: Tensor | None,
    seen: Tensor | None,
    factor: float,
    window: Sequence[int],
    prefix: Sequence[int],
    limit: Sequence[int],
    edge: Sequence[float],
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return room_for_answers(q, weights, limit, save)


@torch.library.custom_op("varifocal::triton_mixture_backward", mutates_args=())
def triton_mixture_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor | None,
    sink: Tensor | None,
    scale: Tensor | None,
    width: Tensor | None,
    position: Tensor | None,
    start: Tensor | None,
    seen: Tensor | None,
    means: Tensor,
    logsumexp: Tensor,
    factor: float,
    window: Sequence[int],
    prefix: Sequence[int],
    limit: Sequence[int],
    edge: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, weights, sink, scale and width ([0] for what is None).

    means is [M, B, H, T, D], or the output [B, H, T, D] of one branch without weights.
    """
    batch, heads, queries, _ = q.shape
    dq, dk, dv, dweights, dsink, dscale, dwidth = found = room_for_gradients(q, k, v, weights, sink, scale, width)
    if not q.numel() or not k.numel():
        for one in found:
            one.zero_()
        return found
    arrangement = arranged(heads, window, prefix, limit, edge)
    grad, q, k, v = rows_together(grad), rows_together(q), rows_together(k), rows_together(v)
    means = rows_together(means)
    branches, key_heads, keys = len(limit), k.shape[1], k.shape[2]
    numbers = q.new_empty((branches, 4, batch, heads, queries), dtype=torch.float32)
    by_row = q.new_empty((2, batch, heads, queries), dtype=torch.float32)
    compiled_for = constants(q, arrangement, position, start)
    exact = precision(q)
    sizes, edges = tables(arrangement, q.device)
    if arrangement.soft < branches:
        dwidth.zero_()
    mean_strides = means.stride()[:4] if means.dim() == 5 else (0, *strides(means))
    with on_device(q):
        backward.row_numbers[(triton.cdiv(queries, ROWS), heads, batch)](
            grad, means, weights, sink, logsumexp, position, start, numbers, dweights, by_row[0],
            *strides(grad), *mean_strides, batch, heads, queries, keys, **compiled_for, BM=ROWS,
        )  # fmt: skip
        tile = tiling("queries", q, documents=start is not None)
        backward.backward_queries[(triton.cdiv(queries, tile.queries), heads, batch)](
            q, k, v, grad, weights, scale, width, sizes, edges, position, start, seen, numbers, dq, by_row[1], dwidth,
            *strides(q), *strides(k), *strides(v), *strides(grad), *strides(dq),
            batch, heads, key_heads, queries, keys, factor, **compiled_for, PRECISION=exact, **options(tile),
        )  # fmt: skip
        tile = tiling("keys", q, documents=start is not None)
        backward.backward_keys[(triton.cdiv(keys, tile.keys), key_heads, batch)](
            q, k, v, grad, scale, width, sizes, edges, position, start, seen, numbers, dk, dv,
            *strides(q), *strides(k), *strides(v), *strides(grad), *strides(dk), *strides(dv),
            batch, heads, key_heads, queries, keys, arrangement.longest_prefix, factor,
            **compiled_for, PRECISION=exact, **options(tile),
        )  # fmt: skip
    for total, of_rows in ((dsink, by_row[0]), (dscale, by_row[1])):
        if total.numel():
            total.copy_(of_rows.sum((0, 2), dtype=torch.float64))
    return found


def room_for_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor | None,
    sink: Tensor | None,
    scale: Tensor | None,
    width: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A gradient for each; [0] for what is None."""

    def like(x: Tensor | None) -> Tensor:
        return q.new_empty(0, dtype=torch.float32) if x is None else torch.empty_like(x)

    return room_like(q), room_like(k), room_like(v), like(weights), like(sink), like(scale), like(width)


@triton_mixture_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor | None,
    sink: Tensor | None,
    scale: Tensor | None,
    width: Tensor | None,
    position: Tensor | None,
    start: Tensor | None,
    seen: Tensor | None,
    means: Tensor,
    logsumexp: Tensor,
    factor: float,
    window: Sequence[int],
    prefix: Sequence[int],
    limit: Sequence[int],
    edge: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return room_for_gradients(q, k, v, weights, sink, scale, width)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    """Save what the backward reads."""
    q, k, v, weights, sink, scale, width, position, start, seen, factor, window, prefix, limit, edge, save = inputs
    out, logsumexp, means = output
    ctx.mark_non_differentiable(logsumexp, means)
    ctx.set_materialize_grads(False)
    ctx.save = save
    ctx.numbers = (factor, window, prefix, limit, edge)
    # Of one branch without weights the output is the mean.
    kept = out if weights is None and len(limit) == 1 else means
    ctx.save_for_backward(q, k, v, weights, sink, scale, width, position, start, seen, kept, logsumexp)


@differentiable_once("varifocal::triton_mixture")
def _backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 16
    if not ctx.save:
        raise RuntimeError("varifocal::triton_mixture was called with save=False and cannot be differentiated")
    given = ctx.saved_tensors
    found = torch.ops.varifocal.triton_mixture_backward(grad, *given, *ctx.numbers)
    wanted = (one if need else None for one, need in zip(found, ctx.needs_input_grad, strict=False))
    return (*wanted, *(None,) * 9)


triton_mixture.register_autograd(_backward, setup_context=_setup)


def strides(x: Tensor) -> tuple[int, ...]:
    """Of batch, head and row."""
    return x.stride()[:3]
