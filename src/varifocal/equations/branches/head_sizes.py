"""Sizes of windows and prefixes: one number, or one for each query head."""

from __future__ import annotations

import torch
from torch import Tensor

from varifocal.equations.branches.base import require_at_least

HeadSizes = int | tuple[int | None, ...]
"""A number for all query heads, or one for each; None stands for every key."""

EVERY_KEY = 2**31 - 1
"""The size that holds every key of any text."""


def require_sizes(what: str, sizes: HeadSizes, *, least: int) -> None:
    """ValueError unless the sizes are whole numbers of at least `least`."""
    if not isinstance(sizes, tuple):
        require_at_least(what, sizes, least)
        return
    if not sizes:
        raise ValueError(f"{what} needs a number for each query head, got an empty tuple")
    for size in sizes:
        if size is not None:
            require_at_least(what, size, least)


def each_head(sizes: tuple[int | None, ...]) -> list[int]:
    """The size of every head as a number that an int32 can hold."""
    return [EVERY_KEY if size is None else min(size, EVERY_KEY) for size in sizes]


def for_heads(sizes: HeadSizes, like: Tensor, *, pairs: bool = False) -> int | Tensor:
    """The size itself, or a tensor [H, 1] that broadcasts over queries ([H, 1, 1] over pairs of a query and a key)."""
    if not isinstance(sizes, tuple):
        return sizes
    numbers = torch.tensor(each_head(sizes), device=like.device)
    return numbers[:, None, None] if pairs else numbers[:, None]


def largest_size(sizes: HeadSizes) -> int | None:
    """The largest size of any head; None if one has no bound."""
    if not isinstance(sizes, tuple):
        return sizes
    return None if None in sizes else max(size for size in sizes if size is not None)
