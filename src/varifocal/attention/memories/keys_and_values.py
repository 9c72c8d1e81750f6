"""Keys and values of all tokens, and the means of blocks of them where a top-k ranks blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from varifocal.attention.backends import prepare
from varifocal.attention.memories.base import Memory, Remembered
from varifocal.equations.layout import Layout, make_layout
from varifocal.equations.problem import PoolingProblem, Shortcuts


@dataclass(frozen=True)
class RankedBlocks:
    """What a top-k by blocks ranks."""

    block: int
    """Keys in a block."""
    of: str = "k"
    """Whose means: the keys' ("k"), or those of a note."""


class KeysAndValues(Memory):
    """All keys and values. With `ranked`, the means of their blocks too, at a cost of O(1) a token."""

    def __init__(self, ranked: RankedBlocks | None = None) -> None:
        super().__init__()
        self.ranked = ranked
        self.means: Tensor | None = None
        """float32 [B, G, ceil(S / block), D]: row f // block is the mean of the block whose first key is f."""
        self.pooled = 0
        """Tokens that the means have taken in."""

    def shortcuts(self, remembered: Remembered, *, new: int, layout: Layout | None) -> Shortcuts | None:
        if self.ranked is None:
            return None
        keys = remembered.k if self.ranked.of == "k" else remembered.notes[self.ranked.of]
        length = keys.shape[2]
        first_call = new == length
        if first_call or (torch.is_grad_enabled() and keys.requires_grad):
            # A call that holds the whole text ranks its own keys; means of earlier calls are of no use.
            self.forget_shortcuts()
            return None
        block = self.ranked.block
        # The means missed some tokens, or there is no room for another block: pool all keys again, with room to spare.
        if self.means is None or self.pooled != length - new or self.means.shape[2] * block < length:
            room = self.rows[self.ranked.of].room
            size = length if room is None else max(length, room.shape[2])
            self.means = torch.zeros(*keys.shape[:2], -(-size // block), keys.shape[3], device=keys.device)
            begin = 0
        else:
            begin = length - new
        added = keys[:, :, begin:]
        problem = PoolingProblem(self.means, added, own_layout(layout, keys, begin), block)
        prepare("auto", problem, device=keys.device.type)()
        self.pooled = length
        return Shortcuts(block_means=self.means)

    def forget_shortcuts(self) -> None:
        self.means, self.pooled = None, 0

    @property
    def bytes(self) -> int:
        means = 0 if self.means is None else self.means.numel() * self.means.element_size()
        return super().bytes + means


def own_layout(layout: Layout | None, keys: Tensor, begin: int) -> Layout:
    """The layout of keys [B, *, S, F] from `begin` on as queries, from that of a call's queries among all S keys."""
    length = keys.shape[2]
    if layout is None or torch.compiler.is_compiling():
        return laid_out_keys(layout, keys, begin)
    # All layers take in the same tokens.
    name = f"keys {begin} to {length}"
    if name not in layout.derived:
        layout.derived[name] = laid_out_keys(layout, keys, begin)
    found: Layout = layout.derived[name]
    return found


def laid_out_keys(layout: Layout | None, keys: Tensor, begin: int) -> Layout:
    """What `own_layout` returns, made anew."""
    batch, _, length, _ = keys.shape
    if layout is None or layout.one_document:
        return make_layout(
            batch=batch, queries=length - begin, keys=length, documents=None, positions=None, device=keys.device
        )
    position = torch.arange(begin, length, device=keys.device).expand(batch, -1)
    return Layout(position=position, start=layout.key_start[:, begin:length], key_start=layout.key_start)
