"""A cache layer with room to grow: a token costs no copy of the cache, and means or summaries stand beside the keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from varifocal.attention.mechanisms import Mechanism
from varifocal.attention.mechanisms.base import RankedBlocks, SummarizedSegments
from varifocal.attention.pooled_keys import PooledKeys
from varifocal.attention.segment_summaries import SegmentSummaries
from varifocal.model.cache import CachedKeys

LEAST_ROOM = 64
"""Tokens of room that a layer has at least."""


class GrowingLayer(DynamicLayer):
    """transformers' growing layer without its copy of everything for each token.

    `keys` and `values` are views of larger tensors. What reorders them (beam search) leaves tensors of their own,
    which get room again with the next token.
    """

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.rooms: tuple[Tensor, Tensor] | None = None
        self.pooled: PooledKeys | None = None
        self.summaries: SegmentSummaries | None = None
        self.pooled_length = 0
        """Tokens that `pooled` or `summaries` have taken in; a layer has at most one of them."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add tokens, and give all of them."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            self.rooms = None  # gradients cannot follow what is overwritten
            grown: tuple[Tensor, Tensor] = super().update(key_states, value_states)
            return grown
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = self.get_seq_length()
        total = length + key_states.shape[2]
        if not self.has_room(total):
            self.rooms = (
                with_room(self.keys, key_states, length, total),
                with_room(self.values, value_states, length, total),
            )
        assert self.rooms is not None
        for room, new in zip(self.rooms, (key_states, value_states), strict=True):
            room[:, :, length:total] = new
        self.keys, self.values = (room[:, :, :total] for room in self.rooms)
        return self.keys, self.values

    def has_room(self, total: int) -> bool:
        """Whether `keys` and `values` are views of tensors that hold `total` tokens."""
        return self.rooms is not None and all(
            part.numel() and part.data_ptr() == room.data_ptr() and room.shape[2] >= total
            for part, room in zip((self.keys, self.values), self.rooms, strict=True)
        )

    def means(self, ranked: RankedBlocks, *, new: int, documents: Tensor | None) -> Tensor:
        """The means of the blocks of all ranked keys, the last `new` of which have just arrived; O(new)."""
        keys, length = ranked.keys, ranked.keys.shape[2]
        store = self.pooled
        if store is None or self.pooled_length != length - new or store.capacity < length:
            room = length if self.rooms is None else max(length, self.rooms[0].shape[2])
            store = PooledKeys(
                batch=keys.shape[0],
                kv_heads=keys.shape[1],
                capacity=room,
                head_width=keys.shape[3],
                block=ranked.block,
            )
            store.update(keys, documents=documents)
        else:
            store.update(keys[:, :, length - new :], positions=torch.arange(length - new, length), documents=documents)
        self.pooled, self.pooled_length = store, length
        return store.means

    def summarized(self, segments: SummarizedSegments, *, new: int) -> Tensor | None:
        """The summaries of all complete segments, the last `new` of whose tokens have just arrived; None for none."""
        length = segments.keys.shape[2]
        if self.summaries is None or self.pooled_length != length - new:
            self.summaries = SegmentSummaries(length=segments.length)
        self.summaries.update(segments.queries, segments.keys, segments.values)
        self.pooled_length = length
        return self.summaries.rows

    def forget_means(self) -> None:
        """Other rows, or fewer tokens: means and summaries are made anew when they are next asked for."""
        self.pooled, self.summaries, self.pooled_length = None, None, 0

    def reset(self) -> None:
        self.rooms = None
        self.forget_means()
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        self.forget_means()
        super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.forget_means()
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.forget_means()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.forget_means()
        super().batch_select_indices(indices)


def with_room(old: Tensor, new: Tensor, length: int, total: int) -> Tensor:
    """A tensor like `new` with the old tokens in it and room beyond `total`: a quarter more, so copies are rare."""
    batch, heads, _, width = new.shape
    room = new.new_empty(batch, heads, total + max(LEAST_ROOM, total // 4), width)
    if length:
        room[:, :, :length] = old
    return room


def let_grow(cache: Cache, layer: int) -> None:
    """Put a growing layer in the place of an empty DynamicLayer of transformers; other kinds stay as they are."""
    replicated: Any = getattr(cache, "layer_class_to_replicate", None)
    if replicated is DynamicLayer:
        while len(cache.layers) <= layer:
            cache.layers.append(replicated())
    found: Any = cache.layers[layer] if layer < len(cache.layers) else None
    if type(found) is DynamicLayer and not found.is_initialized:
        cache.layers[layer] = GrowingLayer()


def kept_pools(
    cache: Cache, layer: int, mechanism: Mechanism[Any], cached: CachedKeys, *, new: int, documents: Tensor | None
) -> Tensor | None:
    """What a layer's cache keeps of blocks of keys for its mechanism: means or summaries.

    None lets the kernel make them of all keys: another kind of cache or device, or gradients that have to flow.
    """
    kept = cache.layers[layer]
    k, v, memory = cached
    if not isinstance(kept, GrowingLayer) or k.device.type != "cpu" or (torch.is_grad_enabled() and k.requires_grad):
        return None
    ranked = mechanism.ranked_blocks(k, memory)
    if ranked is not None:
        return kept.means(ranked, new=new, documents=documents)
    segments = mechanism.summarized_segments(k, v, memory)
    return None if segments is None or documents is not None else kept.summarized(segments, new=new)
