"""A tensor of tokens that grows without a copy of everything for each of them."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_ROOM = 64
"""Tokens of room that are added at least."""


class Rows:
    """Entries [B, *, S, F] of S tokens, a view of a larger tensor that has room for more.

    The first entries are taken as they are, without a copy: a call that keeps nothing for later pays nothing.
    What changes rows or drops tokens leaves a tensor of its own, which gets room again with the next token.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        """Tokens to make room for at once; None to grow as they come."""
        self.filled: Tensor | None = None
        self.room: Tensor | None = None
        self.begin = 0
        """Where in the room the tokens begin."""

    @property
    def length(self) -> int:
        """S."""
        return 0 if self.filled is None else self.filled.shape[2]

    def append(self, new: Tensor) -> Tensor:
        """Add the entries of new tokens [B, *, T, F], and give all of them."""
        if torch.is_grad_enabled() and (new.requires_grad or (self.filled is not None and self.filled.requires_grad)):
            # Gradients cannot follow what is overwritten.
            self.room = None
            self.filled = new if self.filled is None else torch.cat((self.filled, new), dim=2)
            return self.filled
        if self.filled is None and self.capacity is None:
            self.filled = new
            return new
        length, total = self.length, self.length + new.shape[2]
        if not self.has_room(total):
            self.room, self.begin = self.with_room(new, total), 0
        assert self.room is not None
        self.room[:, :, self.begin + length : self.begin + total] = new
        self.filled = self.room[:, :, self.begin : self.begin + total]
        return self.filled

    def has_room(self, total: int) -> bool:
        """Whether the tokens are a view of a tensor that holds `total` of them."""
        if self.room is None or self.filled is None or not self.filled.numel():
            return False
        start = self.room[:, :, self.begin :]
        return self.filled.data_ptr() == start.data_ptr() and start.shape[2] >= total

    def with_room(self, new: Tensor, total: int) -> Tensor:
        """A tensor like `new` that begins with the tokens so far: a quarter more than needed, so copies are rare."""
        batch, heads, _, width = new.shape
        size = total + max(LEAST_ROOM, total // 4) if self.capacity is None else max(self.capacity, total)
        room = new.new_empty(batch, heads, size, width)
        if self.filled is not None and self.length:
            room[:, :, : self.length] = self.filled
        return room

    def make_room(self) -> None:
        """Make room for a fixed number of tokens, if there is one and the room was lost."""
        if self.capacity is None or self.filled is None or self.filled.requires_grad or self.has_room(self.capacity):
            return
        length = self.length
        self.room, self.begin = self.with_room(self.filled, length), 0
        self.filled = self.room[:, :, :length]

    def take_filled(self, tokens: int) -> None:
        """Count tokens that were put into the room after the last one."""
        assert self.room is not None
        self.filled = self.room[:, :, self.begin : self.begin + self.length + tokens]

    def insert_first(self, tokens: int) -> None:
        """Put entries of 0 before the first token."""
        if self.filled is not None:
            batch, heads, _, width = self.filled.shape
            empty = self.filled.new_zeros(batch, heads, tokens, width)
            self.filled, self.room = torch.cat((empty, self.filled), dim=2), None

    def drop_last(self, tokens: int) -> None:
        """Forget the last tokens."""
        if self.filled is not None:
            self.filled = self.filled[:, :, : self.length - tokens]

    def keep_last(self, tokens: int) -> None:
        """Forget all but the last tokens; what was kept for long texts is given back."""
        if self.filled is None or self.length <= tokens:
            return
        dropped = self.length - tokens
        self.filled = self.filled[:, :, dropped:]
        # A view would keep the whole text's memory alive; a room of about the window's size may stay.
        mine = self.room is not None and self.room.shape[2] <= 2 * (tokens + LEAST_ROOM)
        if mine:
            self.begin += dropped
        elif not self.filled.requires_grad:
            self.filled, self.room = self.filled.clone(), None

    def take(self, index: Tensor) -> None:
        """Rows `index` of the batch in place of the present ones."""
        if self.filled is not None:
            self.filled, self.room = self.filled.index_select(0, index.to(self.filled.device)), None

    def repeat(self, times: int) -> None:
        """Every row of the batch `times` times."""
        if self.filled is not None:
            self.filled, self.room = self.filled.repeat_interleave(times, dim=0), None

    def move(self, device: torch.device | str) -> None:
        """To another device."""
        if self.filled is not None and self.filled.device != torch.device(device):
            self.filled, self.room = self.filled.to(device, non_blocking=True), None

    @property
    def bytes(self) -> int:
        """What it really takes, room included."""
        held = self.filled if self.room is None else self.room
        return 0 if held is None else held.numel() * held.element_size()
