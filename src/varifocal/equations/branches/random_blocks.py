"""A few random blocks of the past: Zaheer et al., Big Bird, arXiv:2007.14062."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from varifocal.equations.branches.base import Branch, FixedBranch, both_by_head, less, require_at_least


@dataclass(frozen=True)
class RandomBlocks(FixedBranch):
    """Up to `blocks` blocks of keys before the query's own block, drawn by a hash of the seed and its place.

    Two draws may hit the same block. The draw depends on nothing but the place in the document: the same
    query reads the same blocks in training, in decoding and in every batch.
    """

    blocks: int
    """Blocks drawn for each block of queries."""
    block: int = 64
    """Keys in a block."""
    seed: int = 0
    """Another seed draws other blocks."""

    def __post_init__(self) -> None:
        require_at_least("number of random blocks", self.blocks, 1)
        require_at_least("block", self.block, 1)

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        return self.allows_drawn(query, key, self.draws(query))

    def count(self, place: Tensor, *, beyond: Tensor | int = 0) -> Tensor:
        earlier = torch.div(place, self.block, rounding_mode="floor").clamp(min=0, max=self.blocks)
        return torch.minimum(*both_by_head(earlier * self.block, less(place + 1, beyond)))

    reads_everything = Branch.reads_everything

    def draws(self, query: Tensor) -> tuple[Tensor, ...]:
        """int64: the number of each block that is drawn for queries at the given places."""
        query_block = torch.div(query, self.block, rounding_mode="floor")
        return tuple(
            scramble(query_block * self.blocks + draw, self.seed) % query_block.clamp(min=1)
            for draw in range(self.blocks)
        )

    def allows_drawn(self, query: Tensor, key: Tensor, draws: tuple[Tensor, ...]) -> Tensor:
        """`allows`, from what was drawn for the query."""
        query_block = torch.div(query, self.block, rounding_mode="floor")
        key_block = torch.div(key, self.block, rounding_mode="floor")
        drawn = key_block == draws[0]
        for selected in draws[1:]:
            drawn = drawn | (key_block == selected)
        return drawn & (key_block < query_block)


def scramble(number: Tensor, seed: int) -> Tensor:
    """A hash of whole numbers to int64 0..2^32-1, the same on every device.

    After the mixer lowbias32; the top bit of its second factor is dropped so that no product overflows int64.
    """
    word = 0xFFFFFFFF
    state = (number.long() ^ (seed * 0x9E3779B9 & word)) & word
    state = ((state ^ (state >> 16)) * 0x7FEB352D) & word
    state = ((state ^ (state >> 15)) * 0x046CA68B) & word
    return state ^ (state >> 16)
