"""The keys of the segment at hand, and a matrix of associations for all segments before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from varifocal.attention.memories.base import Memory, Remembered
from varifocal.attention.memories.rows import Rows
from varifocal.equations.branches.compressed import Associations, learned, with_ones
from varifocal.equations.layout import Layout

Features = Callable[[Tensor], Tensor]
"""Positive features [B, G, T, F] of keys [B, G, T, D]."""


@dataclass(frozen=True, eq=False)
class RememberedSegments(Remembered):
    """What queries may read, and what is left of keys that are gone."""

    past: Associations | None = None
    gone: int = 0
    """How many tokens came before the kept ones."""


class SegmentsInMatrix(Memory):
    """Keys and values from the segment of the next token on; of earlier segments of its document M and z.

    Rows of a batch may stand at different places of their documents: kept is from the earliest of their segments on,
    and a row's M holds its own whole segments, whether their keys are gone or not.
    """

    def __init__(self, length: int, features: Features, *, delta: bool, width: int) -> None:
        super().__init__()
        self.segment, self.features, self.delta = length, features, delta
        self.state_share = (width + 1) / 2
        """Keys and values that take as much memory as M and z, for heads of that width."""
        self.matrix: Tensor | None = None
        """[B, G, F, D + 1]: M, and z as its last column."""
        self.folded: Tensor | None = None
        """int64 [B]: tokens that are in it, of the document of the last token when they were taken in."""
        self.folded_at = 0
        """Tokens seen then."""
        self.least = 0
        """Of fewer tokens M knows too much: a crop cannot leave them."""
        self.may_forget = False
        """Whether tokens were taken back: what was kept for it may go with the next ones."""

    @property
    def keeps_all(self) -> bool:
        return False

    def kept(self, length: int) -> float:
        """Those of the segment at hand, and as many as M and z are worth."""
        return length if length < self.segment else length % self.segment + self.state_share

    def new_rows(self) -> Rows:
        """With room for a segment: of a fixed number of tokens it never holds all."""
        return Rows()

    def append(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, layout: Layout | None = None) -> Remembered:
        if self.may_forget:
            self.fold(layout)
        self.may_forget = False
        before = min(self.folded_at, self.length)
        known = super().append(x, q, k, v, layout=layout)
        gone, past = self.length - known.k.shape[2], None
        if self.matrix is not None and self.folded is not None:
            start = starts_at(layout, before - 1, self.folded)
            past = Associations(self.matrix[..., :-1], self.matrix[..., -1], start - gone, self.folded)
        if not self.records_past:
            self.fold(layout)
        return RememberedSegments(known.k, known.v, known.notes, past=past, gone=gone)

    def fold(self, layout: Layout | None) -> None:
        """Take the segments that are complete into M, and forget their keys."""
        known, length = self.read(), self.length
        if known is None or length == 0:
            return
        start = starts_at(layout, length - 1, torch.zeros(len(known.k), dtype=torch.int64, device=known.k.device))
        whole = (length - start).clamp(min=0) // self.segment * self.segment  # [B]
        if self.folded is None and not bool(whole.any()):
            return
        folded = torch.zeros_like(whole)
        if self.folded is not None:
            # What is in M is of no use to another document.
            same = starts_at(layout, min(self.folded_at, length) - 1, start) == start
            folded = torch.where(same, self.folded, 0)
        if bool((whole != folded).any()) or (self.folded is not None and bool((folded != self.folded).any())):
            first = (start - (length - known.k.shape[2])).tolist()
            rows = zip(first, folded.tolist(), whole.tolist(), strict=True)
            self.matrix = torch.cat([self.matrix_of(row, known, *told) for row, told in enumerate(rows)])
        self.folded, self.folded_at = whole, length
        ends = torch.where(start >= length, length, start + whole)
        # Before the document's first token there is the end of another one, whose M is gone.
        self.least = int(torch.where((start > 0) & (whole == 0), ends + 1, ends).clamp(max=length).max())
        for held in self.rows.values():
            held.keep_last(length - int(ends.min()))

    def matrix_of(self, row: int, known: Remembered, first: int, folded: int, whole: int) -> Tensor:
        """[1, G, F, D + 1]: M and z of a row, of whose document `folded` tokens were in it and `whole` shall be."""
        k, v = known.k[row : row + 1], known.v[row : row + 1]
        state = self.matrix[row : row + 1] if folded and self.matrix is not None else None
        for begin in range(first + folded, first + whole, self.segment):
            keys = self.features(k[:, :, begin : begin + self.segment])
            values = with_ones(v[:, :, begin : begin + self.segment].to(keys.dtype))
            state = learned(state, keys, values, delta=self.delta)
        if state is None:
            state = self.features(k[:, :, :0]).mT @ with_ones(v[:, :, :0].to(self.features(k[:, :, :0]).dtype))
        return state

    def crop(self, tokens: int) -> None:
        if 0 < tokens <= self.length and self.length - tokens < self.least:
            raise ValueError(
                f"cannot take back {tokens} tokens: those before {self.least} are in a matrix of associations; "
                "call activate_past_recording() on the cache before them"
            )
        super().crop(tokens)
        self.may_forget = True

    def insert_first(self, tokens: int) -> None:
        super().insert_first(tokens)
        self.shift(tokens)

    def drop_first(self, tokens: int) -> None:
        super().drop_first(tokens)
        self.shift(-tokens)

    def shift(self, tokens: int) -> None:
        """Count the tokens from another one on."""
        if self.folded is not None:
            self.folded_at, self.least = self.folded_at + tokens, max(0, self.least + tokens)

    def reorder(self, index: Tensor) -> None:
        super().reorder(index)
        self.change(lambda one: one.index_select(0, index.to(one.device)))

    def repeat(self, times: int) -> None:
        super().repeat(times)
        self.change(lambda one: one.repeat_interleave(times, dim=0))

    def move(self, device: torch.device | str) -> None:
        super().move(device)
        self.change(lambda one: one.to(device))

    def change(self, change: Callable[[Tensor], Tensor]) -> None:
        """M and what is said of it, row by row."""
        if self.matrix is not None and self.folded is not None:
            self.matrix, self.folded = change(self.matrix), change(self.folded)

    def reset(self) -> None:
        super().reset()
        self.matrix, self.folded, self.folded_at, self.least, self.may_forget = None, None, 0, 0, False

    @property
    def bytes(self) -> int:
        return super().bytes + (0 if self.matrix is None else self.matrix.numel() * self.matrix.element_size())


def starts_at(layout: Layout | None, index: int, like: Tensor) -> Tensor:
    """int64 [B]: where the document of the token at that index begins; beyond all tokens for padding."""
    if layout is None or layout.one_document:
        return torch.zeros_like(like)
    return layout.key_start[:, index]
