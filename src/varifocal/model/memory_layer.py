"""A layer of transformers' cache that holds what a mechanism remembers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, StaticLayer

from varifocal.attention.mechanisms import Mechanism
from varifocal.attention.memories import KeysAndValues, Memory, Remembered
from varifocal.equations.layout import Layout
from varifocal.model.layout import ALONE, Standing

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
        self.padding: Tensor | None = None
        """bool [B, N]: which of the first N tokens are padding that was put before their text; None if none is. The
        tokens after these stand where they were given."""

    @property
    def padding_first(self) -> int:
        """N, of how many tokens, from the first, the padding was put before the text."""
        return 0 if self.padding is None else self.padding.shape[1]

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
            self.memory = self.new_memory(new)
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

    def new_memory(self, new: NewTokens | None) -> Memory:
        """What holds the first tokens and all that follow."""
        return KeysAndValues() if new is None else new.mechanism.memory()

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
        if self.memory is None:
            return
        left = self.memory.length + tokens_to_remove
        first = 0 if self.padding is None or left <= 0 else self.padding_of_removed(self.padding, left)
        self.memory.crop(-tokens_to_remove - first)
        self.memory.drop_first(first)
        self.padding = None if self.padding is None or left <= 0 else self.padding[:, :left]

    def padding_of_removed(self, padding: Tensor, left: int) -> int:
        """How many of the tokens after the first `left` are padding, which stands before the text."""
        counts = set(padding[:, left:].sum(dim=1).tolist())
        if len(counts) > 1:
            raise ValueError(
                f"cannot crop to {left} tokens: there is padding among the first {self.padding_first}, another number "
                f"in each row; crop to {self.padding_first} tokens or more, or to 0"
            )
        return int(counts.pop()) if counts else 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.padding is not None:
            self.padding = self.padding.index_select(0, beam_idx.to(self.padding.device))
        if self.memory is not None:
            self.memory.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.padding is not None:
            self.padding = self.padding.repeat_interleave(repeats, dim=0)
        if self.memory is not None:
            self.memory.repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def reset(self) -> None:
        self.padding = None
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
    """The same with room for a fixed number of tokens, made when the first ones come.

    Compiled code adds tokens to keys and values that already have their room, and counts them in a tensor: a number
    would be compiled into it. What it added, the memory learns before anything else is done with it.
    """

    _layer_type = LAYER_TYPE
    is_compileable = True

    def __init__(self, max_cache_len: int, **kwargs: Any) -> None:
        self._memory: Memory | None = None
        super().__init__()
        self.capacity = self.max_cache_len = max_cache_len
        self.cumulative_length = torch.tensor(0)
        """Tokens so far, those that compiled code added included."""
        self.counted = 0
        """The same when uncompiled code last looked."""
        self.keeps_all = False
        """Whether every token is kept, also where the mechanism needs fewer: compiled code counts them by places."""

    @property
    def memory(self) -> Memory | None:
        """What holds the tokens, all that came included."""
        memory = self._memory
        if memory is not None and not torch.compiler.is_compiling():
            counted = int(self.cumulative_length)
            if counted != self.counted:
                memory.take_filled(counted - self.counted)
                self.counted = counted
        return memory

    @memory.setter
    def memory(self, memory: Memory | None) -> None:
        self._memory = memory

    def new_memory(self, new: NewTokens | None) -> Memory:
        return KeysAndValues() if self.keeps_all else super().new_memory(new)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, new: NewTokens | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():
            keys, values = self.add_compiled(key_states, value_states)
            if new is not None:
                new.remembered = Remembered(keys, values)
            return keys, values
        found = super().update(key_states, value_states, *args, new=new, **kwargs)
        self.count_again()
        return found

    def add_compiled(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Put new keys and values [B, G, T, D] into their room, and give all of it [B, G, capacity, D]."""
        if self._memory is not None and not self._memory.keeps_all:
            raise ValueError(
                "compiled code needs a cache that keeps every token, and this one forgets some; let generate compile, "
                "or call varifocal.model.memory_layer.keep_all_tokens with the empty cache"
            )
        rows = {} if self._memory is None else self._memory.rows
        keys, values = (rows[name].room if name in rows else None for name in ("k", "v"))
        if keys is None or values is None:
            raise ValueError("compiled code adds to a cache that holds tokens already; add the first ones uncompiled")
        places = torch.arange(key_states.shape[2], device=key_states.device) + self.cumulative_length
        self.cumulative_length.add_(key_states.shape[2])
        return keys.index_copy_(2, places, key_states), values.index_copy_(2, places, value_states)

    def get_seq_length(self) -> int:
        # A tensor, where a number would be compiled in.
        return self.cumulative_length if torch.compiler.is_compiling() else super().get_seq_length()  # type: ignore[return-value]

    def count_again(self) -> None:
        """Begin to count from what the memory holds, which has room for more."""
        memory = self._memory
        assert memory is not None
        for rows in memory.rows.values():
            rows.restore_room()
        held = next((rows.filled for rows in memory.rows.values()), None)
        self.cumulative_length = self.cumulative_length.to(
            self.cumulative_length.device if held is None else held.device
        )
        self.cumulative_length.fill_(memory.length)
        self.counted = memory.length

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.count_again() if self._memory is not None else None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self.count_again() if self._memory is not None else None

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.count_again() if self._memory is not None else None

    def reset(self) -> None:
        super().reset()
        self.cumulative_length.zero_()
        self.counted = 0


def can_be_compiled(mechanism: Mechanism[Any]) -> bool:
    """Whether decoding with a static cache can be compiled: keys and values are all that is needed."""
    return mechanism.memory().is_plain


def keep_all_tokens(cache: Cache) -> bool:
    """Let the layers of a static cache keep every token; False if one of them may have forgotten some."""
    for layer in cache.layers:
        if not isinstance(layer, StaticMemoryLayer):
            continue
        if layer.memory is not None and layer.memory.length == 0:
            layer.memory = None
        if layer.memory is None:
            layer.keeps_all = True
        elif not layer.memory.keeps_all:
            return False
    return True


def standing_of(cache: Cache | None) -> Standing:
    """What a cache tells of the order of its tokens; a call without one may stand as it likes."""
    if cache is None:
        return ALONE
    ours = all(isinstance(layer, MemoryLayer) for layer in cache.layers) and bool(cache.layers or makes_ours(cache))
    first = cache.layers[0].padding_first if ours and cache.layers else 0
    if torch.compiler.is_compiling() and cache.is_compileable:
        return Standing(past=0, padding_first=first, arranges=False, filled=cache.get_seq_length(), room=room_of(cache))
    # A static cache answers with a counter that it goes on to change.
    past = int(cache.get_seq_length())
    return Standing(past=past, padding_first=first, keeps_order=True, arranges=ours)


def room_of(cache: Cache) -> int:
    """For how many tokens a static cache has room."""
    room: int = cache.layers[0].get_max_length()
    return room


def note_padding(cache: Cache, padding: Tensor) -> None:
    """Remember which of the first tokens of a cache are padding that was put before their text: bool [B, N]."""
    for layer in cache.layers:
        layer.padding = padding


def insert_padding(cache: Cache, tokens: int) -> None:
    """Put padding before the tokens of a cache: so many for every row."""
    for layer in cache.layers:
        if layer.memory is not None:
            layer.memory.insert_first(tokens)


def makes_ours(cache: Cache) -> bool:
    """Whether a cache has no layers before their first tokens come, and then gets ours."""
    return getattr(cache, "layer_class_to_replicate", None) is DynamicLayer


@dataclass(eq=False)
class LayerOfCache:
    """A layer of a cache, as what a mechanism gives its tokens to.

    The mechanism itself is called while the cache takes them in: what makes its weights ready when it is called, such
    as a hook that brings them from another device, has run by then.
    """

    cache: Cache
    layer: int
    mechanism: Mechanism[Any]
    remembered: Remembered | None = None
    """What the queries of the last tokens could read."""

    def append(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, layout: Layout | None = None) -> Remembered:
        assert layout is not None
        self.remembered = remember(self.cache, self.layer, self.mechanism, x, q, k, v, layout=layout)
        return self.remembered


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
    if makes_ours(cache):
        # It was made without a config.
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
    # A static cache is longer than its text, and compiled code cannot know how much.
    return Remembered(keys[:, :, : layout.keys], values[:, :, : layout.keys])
