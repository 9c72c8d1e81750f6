"""The sizes of tiles that each kernel is launched with, for each kind of GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """How a program is cut, and what it may use."""

    queries: int
    keys: int
    warps: int
    stages: int
    """Tiles that are on their way from memory at the same time."""


INTERPRETED = {"forward": Tile(32, 16, 1, 1), "queries": Tile(16, 32, 1, 1), "keys": Tile(16, 32, 1, 1)}
"""Small, and of three shapes: what is wrong with one tile beside another shows at a length of 33 already."""


def tile_of(kernel: str, *, width: int, bytes_each: int, capability: int) -> Tile:
    """The tile of a kernel ("forward", "queries" or "keys") for heads of `width` channels (a power of two)."""
    return Tile(64, 64, 4, 2)
