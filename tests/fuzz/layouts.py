"""Tensors that lie in memory in odd ways: each is a view of a base, and gradients are compared at the base."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

Shape = tuple[int, ...]


class MemoryLayout(NamedTuple):
    """How a tensor of some shape [B, H, T, D] is cut out of a base."""

    base: Callable[[int, int, int, int], Shape]
    """The shape of the base, from that of the tensor."""
    view: Callable[[Tensor, Shape], Tensor]
    """The tensor, from the base and the tensor's shape."""
    shares: bool = False
    """Whether several entries of the tensor are one in the base."""


MEMORY_LAYOUTS: dict[str, MemoryLayout] = {
    "plain": MemoryLayout(lambda b, h, t, d: (b, h, t, d), lambda x, shape: x),
    "heads_after_tokens": MemoryLayout(lambda b, h, t, d: (b, t, h, d), lambda x, shape: x.transpose(1, 2)),
    "channels_first": MemoryLayout(lambda b, h, t, d: (b, h, d, t), lambda x, shape: x.mT),
    "channels_outermost": MemoryLayout(lambda b, h, t, d: (d, b, h, t), lambda x, shape: x.permute(1, 2, 3, 0)),
    "batch_innermost": MemoryLayout(lambda b, h, t, d: (t, d, h, b), lambda x, shape: x.permute(3, 2, 0, 1)),
    "every_second": MemoryLayout(lambda b, h, t, d: (b, h, t, 2 * d), lambda x, shape: x[..., ::2]),
    "sliced": MemoryLayout(
        lambda b, h, t, d: (b, h + 1, t + 3, d + 5),
        lambda x, shape: x[:, 1:, 2 : 2 + shape[2], 3 : 3 + shape[3]],
    ),
    "same_in_all_rows": MemoryLayout(lambda b, h, t, d: (1, h, t, d), lambda x, shape: x.expand(shape), True),
    "same_in_all_heads": MemoryLayout(lambda b, h, t, d: (b, 1, t, d), lambda x, shape: x.expand(shape), True),
    "same_for_all_tokens": MemoryLayout(lambda b, h, t, d: (b, h, 1, d), lambda x, shape: x.expand(shape), True),
    "same_in_all_channels": MemoryLayout(lambda b, h, t, d: (b, h, t, 1), lambda x, shape: x.expand(shape), True),
    "overlapping": MemoryLayout(
        lambda b, h, t, d: (b, h, t + d), lambda x, shape: x.unfold(2, shape[3], 1)[:, :, : shape[2]], True
    ),
}
