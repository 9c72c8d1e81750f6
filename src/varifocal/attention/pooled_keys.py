"""The mean keys of blocks, kept up to date while tokens arrive: what top-k by blocks ranks when it decodes."""

from __future__ import annotations

import torch
from torch import Tensor

from varifocal.equations.layout import make_layout
from varifocal.kernels.native import library
from varifocal.kernels.native.select import update_pooled


class PooledKeys:
    """A store of block means that costs O(1) a token, for caches of a fixed capacity.

    Row f // block holds the mean of the block whose first key is f; blocks are counted from the start of each document.
    Pass `means` as TopK(pooled=...) together with the cache's keys.
    """

    def __init__(self, *, batch: int, kv_heads: int, capacity: int, head_width: int, block: int) -> None:
        self.block = block
        self.capacity = capacity
        self.means = torch.zeros(batch, kv_heads, -(-capacity // block), head_width)
        """float32 [B, G, ceil(S / block), D]."""

    def update(self, keys: Tensor, *, positions: Tensor | None = None, documents: Tensor | None = None) -> None:
        """Take in new keys [B, G, T, D], in the order of the text.

        Args:
            keys: the new keys.
            positions: integers [T] or [B, T], where they stand in the cache; None for the first T places.
            documents: integers [B, S], the document of each of the cache's keys so far; None for one document.
        """
        batch, _, count, _ = keys.shape
        size = self.capacity if documents is None else documents.shape[1]
        if positions is None:
            positions = torch.arange(count)
        positions = positions.to(keys.device)
        self.means = self.means.to(keys.device)
        layout = make_layout(
            batch=batch, queries=count, keys=size, documents=documents, positions=positions, device=keys.device
        )
        if library.why_missing() is None and keys.device.type == "cpu":
            update_pooled(self.means, keys, position=layout.position.int(), start=layout.start.int(), block=self.block)
        else:
            self._update(keys.detach().float(), layout.position, layout.query_place)

    def _update(self, keys: Tensor, position: Tensor, place: Tensor) -> None:
        """The same in plain torch, a token at a time."""
        rows = torch.arange(keys.shape[0], device=keys.device)
        for token in range(keys.shape[2]):
            seen = place[:, token] >= 0
            within = place[:, token] % self.block
            row = torch.div(position[:, token] - within, self.block, rounding_mode="floor").clamp(min=0)
            share = keys[:, :, token] / self.block
            kept = torch.where((within == 0)[:, None, None], 0.0, self.means[rows, :, row])
            new = torch.where(seen[:, None, None], kept + share, self.means[rows, :, row])
            self.means[rows, :, row] = new
