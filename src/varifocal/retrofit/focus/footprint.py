"""The memory of a request, measured on the memories of a model's layers: bytes held, and what is alive over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from varifocal.attention.mechanisms import HeadShape
from varifocal.attention.mechanisms.focused import Focused, FocusedConfig
from varifocal.results.focus import MapCache
from varifocal.retrofit.focus.comparison import DENSE, Contestant

CHUNK, ANSWER = 512, 128
"""A request reads its prompt in chunks of so many tokens, and answers with so many."""


class Request(NamedTuple):
    """What a request took."""

    held: int
    """Bytes after the prompt."""
    alive: int
    """In each step what was held before and the step's own keys and values, summed over all steps (PruLong's KV
    footprint, arXiv:2506.17121)."""


def measure_caches(maps: Sequence[Contestant], lengths: Sequence[int]) -> list[MapCache]:
    """The caches of all maps for prompts of these lengths; the first map is dense, the measure of the others."""
    known: dict[tuple[tuple[bool, ...], int], Request] = {}

    def request(one: Contestant, length: int) -> Request:
        config = one.gated.gates[0].config
        parts = []
        for gate, full in zip(one.gated.gates, one.full, strict=True):
            if (full, length) not in known:
                windows = tuple(None if head else config.window for head in full)
                known[full, length] = run_request(
                    FocusedConfig(windows=windows, sinks=config.sinks), gate.shape, length
                )
            parts.append(known[full, length])
        return Request(sum(part.held for part in parts), sum(part.alive for part in parts))

    assert maps[0].name == DENSE
    dense = {length: request(maps[0], length) for length in lengths}
    found = []
    for one in maps:
        requests = {length: request(one, length) for length in lengths}
        found.append(
            MapCache(
                name=one.name, keep=one.keep, heads=one.heads,
                bytes={str(length): each.held for length, each in requests.items()},
                footprint={
                    str(length): round(each.alive / dense[length].alive, 4) for length, each in requests.items()
                },
            )
        )  # fmt: skip
    return found


def run_request(config: FocusedConfig, shape: HeadShape, length: int) -> Request:
    """Fill a layer's memory as a request does."""
    memory = Focused(config, shape).memory()
    steps = [CHUNK] * (length // CHUNK) + [length % CHUNK] * (length % CHUNK > 0)
    held = alive = 0
    for number, new in enumerate([*steps, *[1] * ANSWER]):
        if number == len(steps):
            held = memory.bytes
        token = torch.zeros(1, shape.kv_heads, new, shape.head_width)
        alive += memory.bytes + 2 * token.numel() * token.element_size()
        x, q = torch.zeros(1, new, shape.model_width), torch.zeros(1, shape.heads, new, shape.head_width)
        memory.append(x, q, token, token)
    return Request(held, alive)
