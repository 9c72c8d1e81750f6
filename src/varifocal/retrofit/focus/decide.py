"""From scores to a map: which key heads read everything, and which keep a window."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from varifocal.attention.memories.split import HeadGroup

Map = tuple[tuple[bool, ...], ...]
"""By layer and key head, whether it reads everything."""


@dataclass(frozen=True, kw_only=True)
class CacheSizes:
    """What decides the bytes of a cache."""

    layers: int
    kv_heads: int
    head_width: int
    bytes_per_number: int
    window: int
    sinks: int

    def of_head(self, length: int, *, full: bool) -> int:
        """Bytes of one key head after `length` tokens, with all the room that a window takes."""
        room = HeadGroup((), self.window, self.sinks + self.window - 1).room
        tokens = length if full else min(length, room)
        return 2 * self.head_width * self.bytes_per_number * tokens

    def of_map(self, full: Map, length: int) -> int:
        """Bytes of all heads after `length` tokens."""
        return sum(self.of_head(length, full=head) for layer in full for head in layer)

    def heads_within(self, budget: int, length: int) -> int:
        """How many heads may read everything within a budget; ValueError if even none is too many."""
        heads = self.layers * self.kv_heads
        windowed, grown = (self.of_head(length, full=full) for full in (False, True))
        if heads * windowed > budget:
            raise ValueError(
                f"a cache of {budget:,} bytes at {length} tokens is less than the {heads * windowed:,} bytes that "
                f"windows of {self.window} and {self.sinks} sinks take in all {heads} key heads"
            )
        return heads if grown == windowed else min(heads, (budget - heads * windowed) // (grown - windowed))


def heads_of_share(keep: float, heads: int) -> int:
    """The number of key heads nearest to a share of them."""
    if not 0 <= keep <= 1:
        raise ValueError(f"keep is a share of the key heads, from 0 to 1, got {keep:g}")
    return round(keep * heads)


def keep_highest(scores: Tensor, count: int) -> Map:
    """The `count` key heads of the highest scores [layers, key heads], over the whole model; the earlier of equals."""
    flat = scores.flatten().tolist()
    kept = set(sorted(range(len(flat)), key=lambda number: (-flat[number], number))[:count])
    layers, heads = scores.shape
    return tuple(tuple(layer * heads + head in kept for head in range(heads)) for layer in range(layers))


def fewest_heads(rise: Callable[[int], float], accepted: float, heads: int) -> int:
    """The fewest full heads whose rise of the loss is accepted, by bisection: each halving costs one measurement."""
    low, high = 0, heads
    while low < high:
        middle = (low + high) // 2
        if rise(middle) <= accepted:
            high = middle
        else:
            low = middle + 1
    return high


def keep_at_random(layers: int, heads: int, count: int, seed: int) -> Map:
    """A map of `count` heads by chance: what scores must be better than."""
    kept = set(random.Random(seed).sample(range(layers * heads), count))
    return tuple(tuple(layer * heads + head in kept for head in range(heads)) for layer in range(layers))


def keep_layers_in_turn(layers: int, heads: int, count: int) -> Map:
    """Whole layers, evenly spread and the last one among them, as gpt-oss and Gemma do; a rest goes to the next one."""
    whole, rest = divmod(count, heads)
    order: list[int] = []
    if whole:
        order = sorted({layers - 1 - round(number * layers / whole) for number in range(whole)})
    others = [layer for layer in range(layers - 1, -1, -1) if layer not in order]
    # Rounding may let two fall together.
    while len(order) < whole:
        order.append(others.pop(0))
    full = dict.fromkeys(order, heads)
    if rest:
        full[others[len(others) // 2]] = rest
    return tuple(tuple(head < full.get(layer, 0) for head in range(heads)) for layer in range(layers))


def windows_of(full: Map, window: int) -> list[list[int | None]]:
    """The option `windows` of the mechanism `focused`, layer by layer."""
    return [[None if head else window for head in layer] for layer in full]


def share_of(full: Sequence[Sequence[bool]]) -> float:
    """The share of key heads that read everything."""
    heads = [head for layer in full for head in layer]
    return sum(heads) / len(heads)
