"""Where queries stand in their row, and which keys they could see at most."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Layout:
    """Keys sit at 0..S-1 of a row; the query at `position` may see keys `start` <= j <= `position`.

    A document is a run of equal, non-negative ids. Negative ids are padding: a padding key belongs to no
    document, and a padding query has an empty range (its start lies after its position).

    A model makes one layout for a forward pass; all of its layers share it, and what is derived from it.
    """

    position: Tensor
    """int64 [B, T]: the index of each query's own key."""
    start: Tensor
    """int64 [B, T]: the index of the first key of each query's document; S for padding."""
    key_start: Tensor
    """int64 [B, S]: the same for every key."""
    one_document: bool = False
    """Whether every row is one document without padding, known without a look at the values."""
    at_end: bool = False
    """Whether the queries are the last ones of every row, known without a look at the values."""

    # A dictionary and no cached_property, which torch.compile cannot trace.
    derived: dict[str | int, Any] = field(default_factory=dict, repr=False)
    """What was worked out of it already, for all who share it."""

    @property
    def keys(self) -> int:
        """S, the number of keys in a row."""
        return self.key_start.shape[1]

    @property
    def aligned(self) -> bool:
        """Whether there is one query for each key, in the order of the keys."""
        return self.at_end and self.position.shape[1] == self.keys

    @property
    def query_place(self) -> Tensor:
        """int64 [B, T]: each query's place in its own document, counted from 0; negative for padding."""
        if "place" not in self.derived:
            self.derived["place"] = self.position - self.start
        place: Tensor = self.derived["place"]
        return place

    @property
    def key_place(self) -> Tensor:
        """int64 [B, S]: each key's place in its own document, counted from 0; negative for padding."""
        return torch.arange(self.keys, device=self.key_start.device) - self.key_start

    @property
    def ranges(self) -> tuple[Tensor, Tensor]:
        """int32 [B, T], contiguous: position and start, as kernels take them."""
        if "ranges" not in self.derived:
            if self.first_place is not None and self.position.shape[0] == 1:
                ends = (self.first_place, self.first_place + self.position.shape[1])
                self.derived["ranges"] = (counted(*ends, torch.int32)[None], no_starts(ends[1] - ends[0]))
            else:
                self.derived["ranges"] = (self.position.int().contiguous(), self.start.int().contiguous())
        position, start = self.derived["ranges"]
        return position, start

    @property
    def seen(self) -> Tensor:
        """int8 [B, S]: 1 for the keys that some query may see, those up to the last query of each document."""
        if "seen" not in self.derived:
            batch, keys = self.key_start.shape
            reach = torch.full((batch, keys + 1), -1, device=self.start.device)
            # Documents are named by their start; the start of padding is S, hence one entry more than keys.
            reach = reach.scatter_reduce(1, self.start, self.position, "amax")
            index = torch.arange(keys, device=reach.device)
            last = reach.gather(1, self.key_start)
            self.derived["seen"] = ((index >= self.key_start) & (index <= last)).to(torch.int8)
        seen: Tensor = self.derived["seen"]
        return seen

    @property
    def first_place(self) -> int | None:
        """The place of every row's first query, if it is known without a look at the values; on the CPU only."""
        if not (self.one_document and self.at_end) or self.position.device.type != "cpu":
            return None
        return None if torch.compiler.is_compiling() else self.keys - self.position.shape[1]

    def of_last(self, keys: int) -> Layout:
        """The layout of the same queries among the last `keys` keys of each row, for a memory that keeps no more."""
        dropped = self.keys - keys
        if dropped == 0:
            return self
        if keys not in self.derived:
            self.derived[keys] = Layout(
                position=self.position - dropped,
                start=(self.start - dropped).clamp(min=0),
                key_start=(self.key_start[:, dropped:] - dropped).clamp(min=0),
                one_document=self.one_document,
                at_end=self.at_end,
            )
        shorter: Layout = self.derived[keys]
        return shorter

    def pair_places(self) -> tuple[Tensor, Tensor]:
        """Query [B, T, 1] and key [B, T, S] places, both counted from the start of the query's document."""
        index = torch.arange(self.keys, device=self.start.device)
        return self.query_place[:, :, None], index - self.start[:, :, None]

    def visible(self) -> Tensor:
        """bool [B, T, S]: the keys of a query's own document that do not lie in its future."""
        query, key = self.pair_places()
        return (key >= 0) & (key <= query)


FEW = 4096
"""Numbers that are counted once and kept: decoding asks for one more with every token."""


def counted(begin: int, end: int, dtype: torch.dtype) -> Tensor:
    """begin, begin + 1, ... end - 1, to be read only; a view of numbers that were counted before."""
    if end - begin > FEW:
        return torch.arange(begin, end, dtype=dtype)
    page = begin // FEW
    numbers = page_of_numbers(page, dtype)
    return numbers[begin - page * FEW : end - page * FEW]


@functools.lru_cache(maxsize=64)
def page_of_numbers(page: int, dtype: torch.dtype) -> Tensor:
    """The numbers from page * FEW on, as far as any range of FEW numbers that begins on the page."""
    return torch.arange(page * FEW, (page + 2) * FEW, dtype=dtype)


@functools.lru_cache(maxsize=64)
def no_starts(queries: int) -> Tensor:
    """int32 [1, T] of zeros: every query's document begins at the first key. To be read only."""
    return torch.zeros(1, queries, dtype=torch.int32)


def document_starts(documents: Tensor) -> Tensor:
    """The index of the first key of every key's document [B, S], from document ids [B, S]; S for padding."""
    length = documents.shape[1]
    index = torch.arange(length, device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    # Starts only grow along a row, so the running maximum carries each one to the end of its document.
    starts = torch.where(begins, index, 0)
    if torch.compiler.is_exporting():
        # Of what programs are exported to, ONNX has no running maximum.
        starts = torch.where(index[:, :, None] >= index[:, None, :], starts[:, None, :], 0).amax(dim=2)
    else:
        starts = starts.cummax(dim=1).values
    return torch.where(documents >= 0, starts, length)


def make_layout(
    *, batch: int, queries: int, keys: int, documents: Tensor | None, positions: Tensor | None, device: torch.device
) -> Layout:
    """The layout of a call: `documents` [B, S] default to one document a row, `positions` to the last T keys."""
    at_end = positions is None
    if positions is None:
        # Counted anew, unlike what kernels of ours read: torch's compiled FlexAttention misreads a part of a tensor.
        positions = torch.arange(keys - queries, keys, device=device)
    position = positions.to(torch.int64).expand(batch, queries)
    if documents is None:
        # Nothing here costs more for a longer cache: one zero stands for all.
        zero = position.new_zeros(1, 1)
        return Layout(
            position=position,
            start=zero.expand(batch, queries),
            key_start=zero.expand(batch, keys),
            one_document=True,
            at_end=at_end,
        )
    key_start = document_starts(documents.to(torch.int64))
    start = key_start[:, keys - queries :] if at_end else key_start.gather(1, position)
    return Layout(position=position, start=start, key_start=key_start, at_end=at_end)


def repeated_document(documents: Tensor) -> int | None:
    """An id that names two separate runs of one row of `documents` [B, S], or None: runs must be unbroken."""
    documents = documents.to(torch.int64)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    runs = torch.where(begins & (documents >= 0), documents, -1).sort(dim=1).values
    twice = (runs[:, 1:] == runs[:, :-1]) & (runs[:, 1:] >= 0)
    return int(runs[:, 1:][twice][0]) if bool(twice.any()) else None
