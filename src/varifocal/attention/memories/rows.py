"""A tensor of tokens that grows without a copy of everything for each of them."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_ROOM = 64
"""Tokens of room that are added at least."""


class Rows:
    """Entries [B, *, S, F] of S tokens, a part of a larger tensor that has room for more.

    The first entries are taken as they are, without a copy: a call that keeps nothing for later pays nothing.
    What changes rows or drops tokens leaves a tensor of its own, which gets room again with the next token.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        """Tokens to make room for at once; None to grow as they come."""
        self.held: Tensor | None = None
        """Holds the tokens from `begin` on."""
        self.begin = 0
        self.length = 0
        """S."""
        self.has_room = False
        """Whether what lies after the tokens in `held` may be written to."""

    @property
    def filled(self) -> Tensor | None:
        """The entries [B, *, S, F]; None before the first."""
        if self.held is None or (self.begin == 0 and self.length == self.held.shape[2]):
            return self.held
        return self.held[:, :, self.begin : self.begin + self.length]

    @property
    def room(self) -> Tensor | None:
        """The larger tensor, if there is one."""
        return self.held if self.has_room else None

    def append(self, new: Tensor) -> Tensor:
        """Add the entries of new tokens [B, *, T, F], and give all of them."""
        filled = self.filled
        if torch.is_grad_enabled() and (new.requires_grad or (filled is not None and filled.requires_grad)):
            # Gradients cannot follow what is overwritten.
            return self.hold(new if filled is None else torch.cat((filled, new), dim=2))
        if filled is None and self.capacity is None:
            return self.hold(new)
        end = self.begin + self.length
        if not self.has_room or self.held is None or end + new.shape[2] > self.held.shape[2]:
            self.move_to_room(new, self.length + new.shape[2])
            end = self.length
        assert self.held is not None
        self.held[:, :, end : end + new.shape[2]] = new
        self.length += new.shape[2]
        grown = self.filled
        assert grown is not None
        return grown

    def make_room(self, tokens: int) -> Tensor:
        """The tensor that holds the tokens, with room for so many more after them; there must be some already."""
        assert self.held is not None
        if not self.has_room or self.begin + self.length + tokens > self.held.shape[2]:
            self.move_to_room(self.held, self.length + tokens)
        return self.held

    def hold(self, entries: Tensor) -> Tensor:
        """Take a tensor as it is for all there is."""
        self.held, self.begin, self.length, self.has_room = entries, 0, entries.shape[2], False
        return entries

    def move_to_room(self, like: Tensor, total: int) -> None:
        """Copy the tokens to a tensor with a quarter more room than `total` tokens need, so that copies are rare."""
        batch, heads, _, width = like.shape
        size = total + max(LEAST_ROOM, total // 4) if self.capacity is None else max(self.capacity, total)
        room, filled = like.new_empty(batch, heads, size, width), self.filled
        if filled is not None and self.length:
            room[:, :, : self.length] = filled
        self.held, self.begin, self.has_room = room, 0, True

    def restore_room(self) -> None:
        """Make room for a fixed number of tokens, if there is one and the room was lost."""
        if self.capacity is None or self.held is None or self.held.requires_grad:
            return
        if not self.has_room or self.held.shape[2] - self.begin < self.capacity:
            self.move_to_room(self.held, self.length)

    def take_filled(self, tokens: int) -> None:
        """Count tokens that were put into the room after the last one."""
        assert self.has_room
        self.length += tokens

    def insert_first(self, tokens: int) -> None:
        """Put entries of 0 before the first token."""
        if (filled := self.filled) is not None:
            batch, heads, _, width = filled.shape
            self.hold(torch.cat((filled.new_zeros(batch, heads, tokens, width), filled), dim=2))

    def drop_last(self, tokens: int) -> None:
        """Forget the last tokens."""
        self.length -= tokens if self.held is not None else 0

    def keep_last(self, tokens: int) -> None:
        """Forget all but the last tokens; what was kept for long texts is given back."""
        if self.held is None or self.length <= tokens:
            return
        self.begin, self.length = self.begin + self.length - tokens, tokens
        # A view would keep the whole text's memory alive; a room of about the window's size may stay.
        if not (self.has_room and self.held.shape[2] <= 2 * (tokens + LEAST_ROOM)) and not self.held.requires_grad:
            filled = self.filled
            assert filled is not None
            self.hold(filled.clone())

    def keep_sinks_and_last(
        self, first: Tensor | None, sinks: int, tokens: int, *, room: int, heads: tuple[int, ...] | None = None
    ) -> None:
        """Forget all but the last `tokens` tokens, the first of which make place for sinks.

        Args:
            first: int64 [B], where the sinks of each row begin; None if they are the first tokens.
            sinks: how many there are.
            tokens: how many tokens are kept, sinks included.
            room: of how many tokens there is room then.
            heads: the heads that are kept; None for all.
        """
        filled = self.filled
        assert filled is not None
        if heads is not None:
            filled = filled[:, list(heads)] if filled.requires_grad else filled
        length, last = self.length, filled[:, :, self.length - tokens + sinks :]
        if first is None:
            front = filled[:, :, :sinks]
        else:
            places = first[:, None] + torch.arange(sinks, device=first.device)  # [B, sinks]
            places = places.to(filled.device)[:, None, :, None].expand(-1, filled.shape[1], -1, filled.shape[3])
            front = filled.gather(2, places)
        if filled.requires_grad:
            self.hold(torch.cat((front, last), dim=2) if tokens < length else filled)
            return
        if heads is not None:
            front, last = front[:, list(heads)], last[:, list(heads)]
        held = filled.new_empty(filled.shape[0], last.shape[1], max(room, tokens), filled.shape[3])
        held[:, :, :sinks], held[:, :, sinks:tokens] = front, last
        self.held, self.begin, self.length, self.has_room = held, 0, tokens, True

    def take(self, index: Tensor) -> None:
        """Rows `index` of the batch in place of the present ones."""
        if (filled := self.filled) is not None:
            self.hold(filled.index_select(0, index.to(filled.device)))

    def repeat(self, times: int) -> None:
        """Every row of the batch `times` times."""
        if (filled := self.filled) is not None:
            self.hold(filled.repeat_interleave(times, dim=0))

    def move(self, device: torch.device | str) -> None:
        """To another device."""
        if (filled := self.filled) is not None and filled.device != torch.device(device):
            self.hold(filled.to(device, non_blocking=True))

    @property
    def bytes(self) -> int:
        """What it really takes, room included."""
        return 0 if self.held is None else self.held.numel() * self.held.element_size()
