"""What all memories share: tokens come in, and later queries read what was kept of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from varifocal.attention.memories.rows import Rows
from varifocal.equations.layout import Layout
from varifocal.equations.problem import Shortcuts


class RememberedHeads(NamedTuple):
    """What is kept of some key heads."""

    heads: tuple[int, ...]
    """Their numbers."""
    k: Tensor
    """[B, heads, S, D]: keys of the last S tokens; S differs between groups of heads."""
    v: Tensor
    """[B, heads, S, D]."""


@dataclass(frozen=True, eq=False)
class Remembered:
    """What queries may read of the tokens so far."""

    k: Tensor
    """[B, G, S, D]: keys of the last S tokens."""
    v: Tensor
    """[B, G, S, D]: their values."""
    notes: Mapping[str, Tensor] = field(default_factory=dict)
    """[B, *, S, F] by name: what else a mechanism keeps of each of these tokens."""
    shortcuts: Shortcuts | None = None
    """What saves work and changes no result."""
    sinks: int = 0
    """Where fewer than all tokens are kept: how many of the first ones are no longer those just before the others, but
    the first of their document."""
    by_heads: tuple[RememberedHeads, ...] = ()
    """If heads keep different tokens: all that is kept, while k and v are those of the new tokens alone."""


class TakesTokens(Protocol):
    """A memory, or a layer of a cache that keeps one."""

    def append(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, layout: Layout | None = None) -> Remembered:
        """Take in new tokens and give what their queries may read."""


class Memory:
    """What a layer remembers of the tokens that it has seen.

    A kind of memory says in `notes` what it keeps of a token besides its key and value. Everything that can happen to a
    cache (rows of the batch change places, tokens are taken back) happens to all that it keeps.
    """

    def __init__(self) -> None:
        self.length = 0
        """Tokens seen so far, forgotten ones included."""
        self.rows: dict[str, Rows] = {}
        """By name: "k", "v" and the notes."""
        self.capacity: int | None = None
        """Tokens to make room for at once, for caches of a fixed size; None to grow as they come."""
        self.records_past = False
        """Whether tokens that would be forgotten are kept until the next crop, so that it can take tokens back."""

    @property
    def is_plain(self) -> bool:
        """Whether keys and values are all that it needs, so that any cache of transformers can stand in for it."""
        return type(self).notes is Memory.notes and type(self).append is Memory.append

    @property
    def keeps_all(self) -> bool:
        """Whether every token is kept, so that compiled code can count them by their places."""
        return True

    def kept(self, length: int) -> float:
        """Of how many tokens a text of `length` tokens leaves keys and values, on the average of all heads."""
        return length

    def notes(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """What to keep of new tokens besides keys and values: [B, *, T, F] by name.

        Args:
            x: the layer's normed input [B, T, C].
            q: queries [B, H, T, D].
            k: keys [B, G, T, D].
            v: values [B, G, T, D].
        """
        return {}

    def append(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, layout: Layout | None = None) -> Remembered:
        """Take in new tokens, in the order of the text, and give what their queries may read.

        Args:
            x, q, k, v: as in `notes`.
            layout: where the new tokens stand among all that were seen; None for one document a row.
        """
        new = {"k": k, "v": v, **self.notes(x, q, k, v)}
        self.require_room(k.shape[2])
        self.length += k.shape[2]
        grown = {}
        for name, entries in new.items():
            if name not in self.rows:
                self.rows[name] = self.new_rows()
            grown[name] = self.rows[name].append(entries)
        remembered = Remembered(grown.pop("k"), grown.pop("v"), grown)
        shortcuts = self.shortcuts(remembered, new=k.shape[2], layout=layout)
        if shortcuts is not None:
            remembered = Remembered(remembered.k, remembered.v, remembered.notes, shortcuts)
        self.forget_unread()
        return remembered

    def require_room(self, new: int) -> None:
        """ValueError if a cache of a fixed size cannot take so many tokens more."""
        if self.capacity is not None and self.length + new > self.capacity:
            raise ValueError(f"the cache has room for {self.capacity} tokens and holds {self.length}, got {new} more")

    def new_rows(self) -> Rows:
        """What holds the entries of one name; at once with room for a fixed number of tokens, if there is one."""
        return Rows(self.capacity)

    def read(self) -> Remembered | None:
        """What is kept now; None before the first token."""
        kept = {name: rows.filled for name, rows in self.rows.items() if rows.filled is not None}
        return Remembered(kept.pop("k"), kept.pop("v"), kept) if "k" in kept else None

    def shortcuts(self, remembered: Remembered, *, new: int, layout: Layout | None) -> Shortcuts | None:
        """What saves the coming queries work; the last `new` of the remembered tokens have just arrived."""
        return None

    def forget_unread(self) -> None:
        """Drop what no later query can read."""

    def forget_shortcuts(self) -> None:
        """Other rows, or fewer tokens: what was derived from them is made anew when it is next asked for."""

    def crop(self, tokens: int) -> None:
        """Take back the last `tokens` tokens."""
        if not 0 <= tokens <= self.length:
            raise ValueError(f"cannot take back {tokens} tokens of {self.length}")
        for rows in self.rows.values():
            rows.drop_last(tokens)
        self.length -= tokens
        if tokens:
            self.forget_shortcuts()

    def take_filled(self, tokens: int) -> None:
        """Count `tokens` more, whose entries somebody else has put into the room after the last one."""
        for rows in self.rows.values():
            rows.take_filled(tokens)
        self.length += tokens
        self.forget_shortcuts()

    def insert_first(self, tokens: int) -> None:
        """Count `tokens` more before the first one, which no query reads: padding."""
        forgotten = self.length - max((rows.length for rows in self.rows.values()), default=0)
        if not forgotten:
            for rows in self.rows.values():
                rows.insert_first(tokens)
        self.length += tokens
        if tokens:
            self.forget_shortcuts()

    def drop_first(self, tokens: int) -> None:
        """Forget the first `tokens` tokens, as if they had never come."""
        forgotten = self.length - max((rows.length for rows in self.rows.values()), default=0)
        for rows in self.rows.values():
            rows.keep_last(rows.length - max(0, tokens - forgotten))
        self.length -= tokens
        if tokens:
            self.forget_shortcuts()

    def reorder(self, index: Tensor) -> None:
        """Rows `index` of the batch in place of the present ones: another order, some of them twice, or fewer."""
        for rows in self.rows.values():
            rows.take(index)
        self.forget_shortcuts()

    def repeat(self, times: int) -> None:
        """Every row of the batch `times` times."""
        for rows in self.rows.values():
            rows.repeat(times)
        self.forget_shortcuts()

    def reset(self) -> None:
        """Forget everything."""
        self.length = 0
        self.rows = {}
        self.forget_shortcuts()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A memory that goes on by itself; what the mechanism learns stays the mechanism's, and is not copied."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        memo.update({id(one): one for one in vars(self).values() if isinstance(one, nn.Parameter)})
        vars(made).update({name: copy.deepcopy(one, memo) for name, one in vars(self).items()})
        return made

    def move(self, device: torch.device | str) -> None:
        """To another device."""
        for rows in self.rows.values():
            rows.move(device)
        self.forget_shortcuts()

    @property
    def bytes(self) -> int:
        """What it really takes, room for more tokens included."""
        return sum(rows.bytes for rows in self.rows.values())
