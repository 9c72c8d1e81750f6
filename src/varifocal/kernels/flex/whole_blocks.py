"""The complete blocks of every document, without a tensor of blocks x keys.

Two complete blocks begin at least a block's length apart, so the one that begins at key f stands in slot f // length:
as many slots as blocks fit into the row, without a look at the documents.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from varifocal.equations.layout import Layout


def first_keys(layout: Layout, length: int) -> Tensor:
    """int64 [B, N], N = S // length: the first key of the complete block in each slot; S where there is none."""
    keys, slots = layout.keys, layout.keys // length
    place = layout.key_place
    if not slots:
        return place.new_empty(len(place), 0)
    last = F.pad(layout.key_start, (0, length - 1), value=-1)[:, length - 1 :]  # [B, S]: of the key length - 1 after it
    # A block is complete if the key length - 1 after its first one belongs to the same document.
    begins = (place >= 0) & (place % length == 0) & (last == layout.key_start)
    begins = begins[:, : slots * length].reshape(len(begins), slots, length)
    index = torch.arange(keys, device=place.device)[: slots * length].view(slots, length)
    return torch.where(begins, index, keys).amin(dim=2)


def gather_blocks(entries: Tensor, first: Tensor, length: int) -> Tensor:
    """The entries [B, *, S, D] of each block [B, *, N, length, D]; anything where a slot is empty."""
    length = min(length, entries.shape[2])  # where not even one block fits, there is none to gather
    index = first[:, :, None] + torch.arange(length, device=first.device)
    index = index.clamp(max=max(0, entries.shape[2] - 1)).flatten(1)  # [B, N length]
    index = index[:, None, :, None].expand(-1, entries.shape[1], -1, entries.shape[3])
    gathered = entries.gather(2, index)
    return gathered.view(*entries.shape[:2], first.shape[1], length, entries.shape[3])


def earlier(first: Tensor, position: Tensor, start: Tensor, length: int) -> Tensor:
    """bool [B, T, N]: the blocks of a query's document that were complete before its own block began."""
    own = start + torch.div(position - start, length, rounding_mode="floor") * length
    return (first[:, None, :] >= start[:, :, None]) & (first[:, None, :] < own[:, :, None])
