"""All keys of some heads, and of the others a window and the first tokens of the document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from varifocal.attention.memories.base import Memory, Remembered, RememberedHeads
from varifocal.attention.memories.rows import Rows
from varifocal.equations.layout import Layout


class HeadGroup(NamedTuple):
    """Key heads that look equally far back."""

    heads: tuple[int, ...]
    window: int | None
    """Keys that a query reads, its own included; None for all."""
    kept: int
    """The tokens, sinks included, that the next query can read besides its own; of no meaning without a window."""

    @property
    def room(self) -> int:
        """Tokens that are kept at most: with a quarter more than needed, tokens are seldom moved."""
        return self.kept + max(4, self.kept // 4)

    def forgets(self, length: int) -> bool:
        """Whether something of so many tokens is forgotten."""
        return self.window is not None and length > self.room


class SplitKeys(Memory):
    """Full key heads keep all tokens, windowed ones the first `sinks` of the document and the last of the text.

    Until a window has something to forget, all heads are kept in one tensor. Then each group of heads has its own. What
    a windowed group holds looks like the last keys of the text, of which the first `sinks` were overwritten with those
    of their document: `Layout.of_last` places them all where windows and prefixes find them, whatever was forgotten
    between them. Where the document is too short for a gap, these are the keys that stand there anyway.
    """

    def __init__(self, windows: tuple[int | None, ...], sinks: int) -> None:
        super().__init__()
        self.sinks = sinks
        self.heads = len(windows)
        by_window: dict[int | None, list[int]] = {}
        for head, window in enumerate(windows):
            by_window.setdefault(window, []).append(head)
        self.groups = tuple(
            HeadGroup(tuple(heads), window, 0 if window is None else sinks + window - 1)
            for window, heads in by_window.items()
        )
        self.is_split = False
        """Whether each group has tensors of its own."""
        self.may_forget = False
        """Whether tokens were taken back: those that were kept for it may go with the next ones."""

    @property
    def is_plain(self) -> bool:
        return True

    @property
    def keeps_all(self) -> bool:
        return False

    def kept(self, length: int) -> float:
        """Of windows with all their room."""
        if length <= self.least_room:
            return length
        return sum(len(one.heads) * (one.room if one.forgets(length) else length) for one in self.groups) / self.heads

    @property
    def least_room(self) -> int:
        """The tokens that every window has room for: with more of them, something is forgotten."""
        return min(group.room for group in self.groups if group.window is not None)

    def append(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, layout: Layout | None = None) -> Remembered:
        new = k.shape[2]
        self.require_room(new)
        self.make_room(new, layout)
        self.length += new
        if not self.is_split:
            for name, entries in (("k", k), ("v", v)):
                if name not in self.rows:
                    self.rows[name] = Rows()
                self.rows[name].append(entries)
            whole = self.read_whole()
            remembered = Remembered(*whole, sinks=self.sinks)
        else:
            parts = tuple(
                RememberedHeads(
                    group.heads,
                    *(rows.append(part[:, list(group.heads)]) for rows, part in zip(held, (k, v), strict=True)),
                )
                for group, held in self.split_rows()
            )
            remembered = Remembered(k, v, sinks=self.sinks, by_heads=parts)
        self.forget_read(layout)
        return remembered

    def read_whole(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads, as long as they are kept together."""
        k, v = (self.rows[name].filled for name in ("k", "v"))
        assert k is not None
        assert v is not None
        return k, v

    def split_rows(self) -> Iterator[tuple[HeadGroup, tuple[Rows, Rows]]]:
        """Every group with its keys and values."""
        for number, group in enumerate(self.groups):
            yield group, (self.rows[f"k{number}"], self.rows[f"v{number}"])

    def held_rows(self) -> Iterator[tuple[HeadGroup, tuple[Rows, Rows]]]:
        """The same, or the one group there is; nothing while several groups are kept together."""
        if self.is_split:
            yield from self.split_rows()
        elif len(self.groups) == 1 and self.rows:
            yield self.groups[0], (self.rows["k"], self.rows["v"])

    def make_room(self, new: int, layout: Layout | None) -> None:
        """Forget what no query can read, if `new` more tokens would not fit or tokens were taken back.

        Args:
            new: tokens that are about to come.
            layout: of all tokens, the new ones included.
        """
        if self.may_forget:
            self.may_forget = False
            self.forget(layout)
        if self.records_past:
            return
        for group, held in self.held_rows():
            if group.window is not None and held[0].length + new > group.room >= group.kept + new:
                self.shorten(group, held, layout)

    def forget_read(self, layout: Layout | None) -> None:
        """Drop what only the newest queries could read, unless tokens may be taken back."""
        if not self.records_past:
            self.forget(layout)

    def forget(self, layout: Layout | None) -> None:
        """Drop what no later query can read, where that is worth a copy.

        Args:
            layout: of all tokens so far, and maybe of some that are about to come.
        """
        if len(self.groups) > 1 and not self.is_split:
            if self.length <= self.least_room:
                return
            whole = self.read_whole()
            self.rows = {}
            for number, group in enumerate(self.groups):
                for name, entries in zip("kv", whole, strict=True):
                    rows = self.rows[f"{name}{number}"] = Rows(self.capacity if group.window is None else None)
                    if group.forgets(self.length):
                        rows.hold(entries)
                    else:
                        rows.append(entries[:, list(group.heads)])
            self.is_split = True
            for group, held in self.split_rows():
                if group.forgets(self.length):
                    self.shorten(group, held, layout, heads=group.heads)
            return
        for group, held in self.held_rows():
            if group.forgets(held[0].length):
                self.shorten(group, held, layout)

    def shorten(
        self,
        group: HeadGroup,
        held: tuple[Rows, Rows],
        layout: Layout | None,
        *,
        heads: tuple[int, ...] | None = None,
    ) -> None:
        """Keep the sinks and the window of a group, of these heads alone if any are named."""
        length = held[0].length
        drop, forgotten = max(0, length - group.kept), self.length - length
        first: Tensor | None = None
        if self.sinks and drop and layout is not None and not layout.one_document:
            # The document of the last token that is dropped is the only one that reaches into the window. Where it
            # begins too late for a gap (or there is padding), its first tokens are those that stand there anyway.
            start = layout.key_start[:, forgotten + drop + self.sinks - 1]
            first = (start - forgotten).clamp(min=0, max=drop)
        for rows in held:
            rows.keep_sinks_and_last(first, self.sinks if drop else 0, length - drop, room=group.room, heads=heads)

    def read(self) -> Remembered | None:
        """Of tokens that every head keeps."""
        if not self.is_split:
            return super().read()
        length = min(
            rows.length if rows.length == self.length else rows.length - self.sinks
            for _, (rows, _) in self.split_rows()
        )
        order = torch.tensor([head for group in self.groups for head in group.heads]).argsort()

        def last(which: int) -> Tensor:
            filled = [held[which].filled for _, held in self.split_rows()]
            parts = [one[:, :, one.shape[2] - length :] for one in filled if one is not None]
            return torch.cat(parts, dim=1)[:, order]

        return Remembered(last(0), last(1))

    def crop(self, tokens: int) -> None:
        for group, (rows, _) in self.held_rows():
            forgotten = self.length - rows.length
            if group.window is not None and tokens and forgotten and rows.length - tokens < group.kept:
                raise ValueError(
                    f"cannot take back {tokens} tokens: a window of {group.window} keys forgot {forgotten} before "
                    "them; call activate_past_recording() on the cache before them"
                )
        super().crop(tokens)
        self.may_forget = bool(self.length)

    def insert_first(self, tokens: int) -> None:
        for rows in self.rows.values():
            if rows.length == self.length:
                rows.insert_first(tokens)
        self.length += tokens

    def drop_first(self, tokens: int) -> None:
        for rows in self.rows.values():
            rows.keep_last(rows.length - max(0, tokens - (self.length - rows.length)))
        self.length -= tokens

    def reset(self) -> None:
        super().reset()
        self.is_split = self.may_forget = False
