"""A layer of transformers' cache that holds what a mechanism remembers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, StaticLayer

from varifocal.attention.mechanisms import Mechanism
from varifocal.attention.memories import KeysAndValues, Memory, Remembered
from varifocal.equations.layout import Layout

LAYER_TYPE = "varifocal_memory"
"""The kind of layer that our configs ask transformers' caches for."""


@dataclass(eq=False)
class NewTokens:
    """What a memory takes in besides keys and values, and where its answer is put."""

    mechanism: Mechanism[Any]
    x: Tensor
    """[B, T, C]."""
    q: Tensor
    """[B, H, T, D]."""
    layout: Layout
    remembered: Remembered | None = None
    """What the tokens' queries may read."""


class MemoryLayer(CacheLayerMixin):
    """Holds a Memory, which the layer's mechanism makes when its first tokens come."""

    _layer_type = LAYER_TYPE
    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, **kwargs: Any) -> None:
        self.memory: Memory | None = None
        self.capacity: int | None = None
        self.record_past = False
        """Whether what would be forgotten is kept until the next crop, so that tokens can be taken back."""

    @property
    def is_initialized(self) -> bool:
        """Whether any token has come."""
        return self.memory is not None

    @property
    def keys(self) -> Tensor | None:
        """The keys [B, G, S, D] that are kept."""
        kept = None if self.memory is None else self.memory.read()
        return None if kept is None else kept.k

    @property
    def values(self) -> Tensor | None:
        """The values [B, G, S, D] that are kept."""
        kept = None if self.memory is None else self.memory.read()
        return None if kept is None else kept.v

    @property
    def bytes(self) -> int:
        """What the layer really takes."""
        return 0 if self.memory is None else self.memory.bytes

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """A memory begins with its first tokens."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, new: NewTokens | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take in the keys and values [B, G, T, D] of new tokens, and give those that their queries may read."""
        if self.memory is None:
            self.memory = KeysAndValues() if new is None else new.mechanism.memory()
            self.memory.capacity = self.capacity
            self.memory.records_past = self.record_past
        if new is None:
            if not self.memory.is_plain:
                raise ValueError(
                    f"{type(self.memory).__name__} remembers more than keys and values; give the tokens to the model, "
                    "which adds them to its cache"
                )
            # Somebody else fills the cache with keys and values alone; a plain memory looks at neither x nor q.
            remembered = self.memory.append(key_states, key_states, key_states, value_states)
        else:
            remembered = self.memory.append(new.x, new.q, key_states, value_states, layout=new.layout)
            new.remembered = remembered
        return remembered.k, remembered.v

    def get_seq_length(self) -> int:
        return 0 if self.memory is None else self.memory.length

    def get_max_length(self) -> int:
        return -1 if self.capacity is None else self.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def activate_past_recording(self) -> None:
        self.record_past = True
        if self.memory is not None:
            self.memory.records_past = True

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative number of tokens to remove, got {tokens_to_remove}")
        if self.memory is not None:
            self.memory.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.memory is not None:
            self.memory.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.memory is not None:
            self.memory.repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.memory is not None:
            self.memory.reorder(indices)

    def reset(self) -> None:
        if self.memory is not None:
            self.memory.reset()

    def offload(self) -> None:
        if self.memory is not None:
            self.home = None if self.keys is None else self.keys.device
            self.memory.move("cpu")

    def prefetch(self) -> None:
        home = getattr(self, "home", None)
        if self.memory is not None and home is not None:
            self.memory.move(home)


class StaticMemoryLayer(MemoryLayer, StaticLayer):
    """The same with room for a fixed number of tokens, made when the first ones come."""

    _layer_type = LAYER_TYPE
    is_compileable = False

    def __init__(self, max_cache_len: int, **kwargs: Any) -> None:
        super().__init__()
        self.capacity = self.max_cache_len = max_cache_len


@dataclass(frozen=True, eq=False)
class LayerOfCache:
    """A layer of a cache, as what a mechanism gives its tokens to.

    The mechanism itself is called while the cache takes them in: what makes its weights ready when it is called, such
    as a hook that brings them from another device, has run by then.
    """

    cache: Cache
    layer: int
    mechanism: Mechanism[Any]

    def append(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, layout: Layout | None = None) -> Remembered:
        assert layout is not None
        return remember(self.cache, self.layer, self.mechanism, x, q, k, v, layout=layout)


def remember(
    cache: Cache, layer: int, mechanism: Mechanism[Any], x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, layout: Layout
) -> Remembered:
    """Add new tokens to a layer of a cache, and give what their queries may read.

    Args:
        cache: of transformers. Its layers are ours where it was made with our config, or makes them as they come;
            layers of another kind serve mechanisms that need no more than they keep, and are refused for others.
        layer: the layer's index.
        mechanism: the layer's.
        x, q, k, v: of the new tokens, as in Memory.append.
        layout: where the new tokens stand among all that were seen.
    """
    if getattr(cache, "offloading", False) and k.device.type == "cpu":
        raise ValueError(
            "a cache with offloading=True moves layers from a GPU to main memory, and this model is on the cpu; "
            "leave offloading out"
        )
    if getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:
        # A cache that was made without a config has no layers before their first tokens come.
        while len(cache.layers) <= layer:
            cache.layers.append(MemoryLayer())
    found = cache.layers[layer] if layer < len(cache.layers) else None
    if isinstance(found, MemoryLayer):
        new = NewTokens(mechanism, x, q, layout)
        cache.update(k, v, layer, new=new)
        assert new.remembered is not None
        return new.remembered
    if found is None and getattr(cache, "layer_class_to_replicate", None) is None:
        raise ValueError(
            f"the cache has {len(cache.layers)} layers, and this is layer {layer} of the model, counted from 0; "
            "make the cache with the model's config, as in DynamicCache(config=model.config)"
        )
    if not mechanism.memory().is_plain:
        raise ValueError(
            f"{mechanism.name} remembers more than keys and values, for which a {type(found).__name__} has no room; "
            "make the cache with the model's config, as in DynamicCache(config=model.config)"
        )
    if found is not None and getattr(found, "is_sliding", False):
        # A sliding layer drops old keys by itself; that is right only for a mechanism that never looks further back.
        reach, kept = mechanism.farthest(), found.get_max_length()
        if reach is None or reach > kept:
            raise ValueError(
                f"{mechanism.name} reads {'all' if reach is None else reach} keys back, of which a "
                f"{type(found).__name__} keeps {kept}; "
                "make the cache with the model's config, as in DynamicCache(config=model.config)"
            )
    keys, values = cache.update(k, v, layer)
    # A static cache is longer than its text.
    return Remembered(keys[:, :, : layout.keys], values[:, :, : layout.keys])
