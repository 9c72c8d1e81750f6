"""A reading through FlexAttention, compiled: once for each kind of reading, whatever the lengths."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from varifocal.equations.branches import FixedBranch
from varifocal.kernels.flex.compiler_settings import generating
from varifocal.kernels.flex.dense import attend_dense, find_logsumexp
from varifocal.kernels.flex.joining import mix
from varifocal.kernels.flex.key_sets import OUTSIDE, Selected
from varifocal.kernels.flex.reading import Reading
from varifocal.kernels.flex.tiles import TILE, Tiles, make_tiles

NARROWEST = 16
"""The least head width that the matrix units of a GPU take; narrower heads are filled up with zeros."""
LONG_PIPELINE = 131_072
"""Bytes of shared memory that a selection's forward kernel asks for, at the tiles that FlexAttention takes by itself
for heads of 128 on GPUs that have no more than that. A10, L4, 3090 and 4090 have 101,376."""
VARIANTS = 16
"""Kernels of one kind, at most. `kind` names what a kernel is known to depend on, so that one is expected; the rest is
for what torch guards on besides, such as the order of strides. Beyond the limit it raises."""


def attend_compiled(reading: Reading, *, at_end: bool) -> tuple[Tensor, Tensor]:
    """The output [B, H, T, D] and logsumexp [B, H, T] of a reading; 0 and minus infinity where nothing is read."""
    on_cpu = reading.q.device.type == "cpu"
    if on_cpu and overrun_by_kernel(reading.k.shape[2]):
        return attend_dense(reading)
    tiles = make_tiles(reading, at_end=at_end, backward=not on_cpu and torch.is_grad_enabled())
    width = reading.q.shape[-1]
    q, k, v = (filled_up(part, on_cpu=on_cpu) for part in (reading.q, reading.k, reading.v))
    if on_cpu:
        # Without a backward there, FlexAttention declines what could ask for one, even under torch.no_grad().
        q, k, v = q.detach(), k.detach(), v.detach()
    output, logsumexp = launch(q, k, v, reading, tiles)
    # A compiled kernel has no logsumexp on a CPU.
    return output[..., :width], find_logsumexp(reading) if logsumexp is None else logsumexp


def launch(q: Tensor, k: Tensor, v: Tensor, reading: Reading, tiles: Tiles) -> tuple[Tensor, Tensor | None]:
    """Run the kernel of a reading's kind on heads that are filled up; no logsumexp on a CPU."""
    on_cpu = q.device.type == "cpu"
    if has_fixed_rows(reading):
        # Views: the mark must not stay on a caller's tensor.
        q, k, v = (part.view_as(part) for part in (q, k, v))
        for part in (q, k, v):
            torch._dynamo.mark_static(part, 0)
    run = compiled_for(kind(reading, tiles))
    short = not on_cpu and needs_short_pipeline(reading, shared_memory(q.device))
    with generating(on_cpu=on_cpu):
        return run(q, k, v, reading, tiles, not on_cpu, short)


def needs_short_pipeline(reading: Reading, limit: int) -> bool:
    """Whether three stages of keys and values would not fit in a block's shared memory of `limit` bytes.

    Queries stay in registers as long as the function of a pair is simple. Beside one that looks a selection up they
    move to shared memory: 128 KB with three stages of 64 keys, 96 KB with two.
    """
    return limit < LONG_PIPELINE and any(isinstance(member, Selected) for member in reading.sets)


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block may ask for on a GPU."""
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", LONG_PIPELINE))


def mix_compiled(means: tuple[Tensor, ...], factors: tuple[Tensor | None, ...], dtype: torch.dtype) -> Tensor:
    """`mix`, on a GPU as one kernel that reads every mean once; its backward is another."""
    if means[0].device.type == "cpu" or (len(means) == 1 and factors[0] is None):
        return mix(means, factors, dtype)
    with generating(on_cpu=False):
        return mixer_for((torch.is_grad_enabled(), outline(means), outline(factors), dtype))(means, factors, dtype)


@functools.cache
def mixer_for(kind: Hashable) -> Callable[..., Tensor]:
    """The compiled `mix` for one kind of means and factors."""
    options: dict[str, Any] = {"recompile_limit": VARIANTS, "isolate_recompiles": True}
    compiled: Callable[..., Tensor] = torch.compile(mix, dynamic=True, fullgraph=True, **options)
    return compiled


def has_fixed_rows(reading: Reading) -> bool:
    """Whether a kernel is for one number of rows: on a GPU, where one query's keys are shared among many blocks."""
    return reading.q.device.type != "cpu" and reading.q.shape[2] == 1


def overrun_by_kernel(keys: int) -> bool:
    """Whether a CPU's kernel of torch 2.13 may write past its scores, on to the maxima of the first queries.

    Its product of queries and keys stores whole blocks of columns whenever the keys fill vectors (of 8 or 16) but not
    blocks (of 16 to 48). Only with fewer keys than a tile does the space for the scores end there. At that size all
    pairs at once cost nothing.
    """
    return keys < TILE and keys % 8 == 0


def filled_up(heads: Tensor, *, on_cpu: bool) -> Tensor:
    """Heads at least as wide as a GPU's kernel needs."""
    missing = 0 if on_cpu else max(0, NARROWEST - heads.shape[-1])
    return F.pad(heads, (0, missing)) if missing else heads


def kind(reading: Reading, tiles: Tiles) -> Hashable:
    """What a kernel is generated for: everything of a reading but its numbers and lengths."""
    return (
        reading.q.device.type,
        reading.q.shape[1],
        reading.k.shape[1],
        reading.q.shape[3],
        reading.q.shape[0] if has_fixed_rows(reading) else None,
        torch.is_grad_enabled(),
        outline(reading),
        outline(tiles),
    )


def outline(part: Any) -> Hashable:
    """What of a part torch's compiler looks at: types, fractions, and which numbers and sizes are 0 or 1."""
    if isinstance(part, Tensor):
        return part.dtype, tuple(outline(size) for size in part.shape), part.requires_grad
    if isinstance(part, bool | float | str | None):
        return part
    if isinstance(part, int):
        return part if part in (0, 1) else "a number"
    if isinstance(part, tuple | list):
        return tuple(outline(one) for one in part)
    if dataclasses.is_dataclass(part):
        named = {one.name: getattr(part, one.name) for one in dataclasses.fields(part) if OUTSIDE not in one.metadata}
    elif isinstance(part, FixedBranch):
        named = vars(part)
    else:
        # A branch of a user's own may keep anything.
        named = {}
    return type(part), tuple((name, outline(one)) for name, one in sorted(named.items()))


@functools.cache
def compiled_for(kind: Hashable) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The compiled call for one kind of reading; each keeps its own kernels, so no kind crowds out another."""
    options: dict[str, Any] = {"recompile_limit": VARIANTS, "isolate_recompiles": True}
    compiled: Callable[..., tuple[Tensor, Tensor | None]] = torch.compile(
        call_flex, dynamic=True, fullgraph=True, **options
    )
    return compiled


def call_flex(
    q: Tensor, k: Tensor, v: Tensor, reading: Reading, tiles: Tiles, with_logsumexp: bool, short_pipeline: bool
) -> tuple[Tensor, Tensor | None]:
    """FlexAttention with the functions of a reading."""
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return reading.mask(batch, head, query, key)

    def rate(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return reading.rate(score, batch, head, query, key)

    by_column = (None, None, None, None) if tiles.columns is None else tiles.columns
    block_mask = BlockMask(
        (q.shape[2], k.shape[2]),
        tiles.partial_count,
        tiles.partial,
        tiles.full_count,
        tiles.full,
        by_column[0],
        by_column[1],
        by_column[2],
        by_column[3],
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=mask,
    )
    scale = reading.score.scale
    options: Any = {"fwd_num_stages": 2} if short_pipeline else None
    if with_logsumexp:
        output, auxiliary = flex_attention(
            q,
            k,
            v,
            rate,
            block_mask,
            scale,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
            kernel_options=options,
        )
        return output, auxiliary.lse
    return flex_attention(q, k, v, rate, block_mask, scale, enable_gqa=True), None
