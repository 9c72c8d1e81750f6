"""What past keys carry in a cache besides k and v: it rides along with k, in any cache of transformers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import Cache


class CachedKeys(NamedTuple):
    """What a layer may read after a call's tokens were added to its cache."""

    k: Tensor
    """[B, G, S, D]: the last S tokens, those of the call included."""
    v: Tensor
    """[B, G, S, D]."""
    memory: Tensor | None
    """[B, *, S, F]: the mechanism's memory of them."""


def update_cache(cache: Cache, layer: int, k: Tensor, v: Tensor, *, memory: Tensor | None, total: int) -> CachedKeys:
    """Add the keys, values and memory of new tokens to a layer's cache, and give those of all tokens that it keeps.

    Args:
        cache: any cache of transformers; what it does to keys (grow, slide, reorder, crop) it does to the memory too.
        layer: the layer's index.
        k, v: new keys and values [B, G, T, D].
        memory: `Mechanism.remember` of the new tokens [B, N, T, F], N a multiple of G, or None.
        total: tokens so far, the new ones included.
    """
    width = k.shape[-1]
    packed = k if memory is None else torch.cat((k, pack(memory, k)), dim=-1)
    keys, values = cache.update(packed, v, layer)
    if keys.shape[2] > total:
        # A static cache is longer than its text.
        keys, values = keys[:, :, :total], values[:, :, :total]
    if memory is None:
        return CachedKeys(keys, values, None)
    return CachedKeys(keys[..., :width], values, unpack(keys[..., width:], memory))


def pack(memory: Tensor, k: Tensor) -> Tensor:
    """Memory [B, N, T, F] beside the keys [B, G, T, D]: [B, G, T, N / G * F], in the dtype of the keys.

    Bits are kept: a float32 rides as two numbers of bfloat16, for rounded memory would choose other keys.
    """
    heads = k.shape[1]
    if memory.shape[1] % heads:
        raise ValueError(f"memory [B, N, T, F] needs a multiple of {heads} heads, got shape {tuple(memory.shape)}")
    rows: Tensor = memory.unflatten(1, (heads, -1)).transpose(2, 3).flatten(3)  # type: ignore[no-untyped-call]
    return rows if rows.dtype == k.dtype else rows.contiguous().view(k.dtype)


def unpack(rows: Tensor, memory: Tensor) -> Tensor:
    """The memory [B, N, S, F] of all keys from what `pack` made of it, of the dtype and heads of `memory`."""
    if rows.dtype != memory.dtype:
        rows = rows.contiguous().view(memory.dtype)
    rows = rows.unflatten(3, (-1, memory.shape[-1]))  # type: ignore[no-untyped-call]
    return rows.transpose(2, 3).flatten(1, 2)
