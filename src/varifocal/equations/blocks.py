"""Keys grouped into blocks of equal length that begin anew with every document."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from varifocal.equations.layout import Layout


@dataclass(frozen=True)
class Blocks:
    """The N blocks of each row; a row with fewer blocks than the fullest one leaves its last ones empty."""

    length: int
    """Keys in a full block."""
    number: Tensor
    """int64 [B, S]: the block that each key belongs to; -1 for padding."""
    member: Tensor
    """bool [B, N, S]: whether a key belongs to a block."""
    first: Tensor
    """int64 [B, N]: the index of the block's first key; S for an empty block."""

    def earlier(self, layout: Layout) -> Tensor:
        """bool [B, T, N]: the blocks of a query's document that were complete before its own block began."""
        own_block = layout.start + layout.query_place // self.length * self.length  # [B, T]
        first = self.first[:, None, :]
        return (first >= layout.start[:, :, None]) & (first < own_block[:, :, None])


def make_blocks(layout: Layout, length: int) -> Blocks:
    """Cut every document of every row into blocks of `length` keys; the last one of a document may be short."""
    place, size = layout.key_place, layout.keys
    begins = (place >= 0) & (place % length == 0)
    number = begins.long().cumsum(dim=1) - 1  # [B, S]
    number = torch.where(place >= 0, number, -1)
    count = count_blocks(layout, number, length)
    member = number[:, None, :] == torch.arange(count, device=number.device)[:, None]  # [B, N, S]
    index = torch.arange(size, device=number.device)
    first = torch.where(member, index, size).amin(dim=2) if size else member.new_zeros(len(member), 0).long()
    return Blocks(length=length, number=number, member=member, first=first)


def count_blocks(layout: Layout, number: Tensor, length: int) -> int:
    """N of the numbers [B, S] of blocks; a bound of it where values cannot be looked at, the last blocks are empty."""
    if torch.compiler.is_exporting():
        return (layout.keys + length - 1) // length if layout.one_document else layout.keys
    return int(number.max()) + 1 if number.numel() else 0


def same_block(query: Tensor, key: Tensor, length: int) -> Tensor:
    """True where the places `query` and `key` of one document lie in the same block of `length` keys."""
    return torch.div(query, length, rounding_mode="floor") == torch.div(key, length, rounding_mode="floor")
