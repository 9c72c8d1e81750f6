"""Rows of a fixed length, cut from the documents of a split one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from varifocal.data.dataset import TokenSplit

PADDING = -1
"""The document number of padding; attention does not read padding, and padding reads nothing."""


class Row(NamedTuple):
    """One row: tokens, whose document each belongs to, and its place there. All int64 [L]."""

    input_ids: NDArray[numpy.int64]
    documents: NDArray[numpy.int64]
    positions: NDArray[numpy.int64]


class Rows(NamedTuple):
    """Several rows. All int64 [N, L]."""

    input_ids: NDArray[numpy.int64]
    documents: NDArray[numpy.int64]
    """The number of the document within its split; one number for the whole row if documents are joined."""
    positions: NDArray[numpy.int64]
    """The distance from the first token of the same document in the same row: 0, 1, 2, ..."""


class RowAnswers(NamedTuple):
    """The questions of a probe in several rows. All int64 [Q]."""

    rows: NDArray[numpy.int64]
    columns: NDArray[numpy.int64]
    """Where the answer stands; the logits one column before it answer the question."""
    distances: NDArray[numpy.int64]


class Runs(NamedTuple):
    """Runs of tokens of one document each, in the rows of a batch laid end to end."""

    borders: list[NDArray[numpy.int64]]
    """Where runs begin, ascending; every row begins one."""
    first: list[int]
    """The document of each row's first run; those of the others follow it one by one."""
    counts: list[int]
    """How many runs each row has."""

    def spread(self, shape: tuple[int, int]) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]:
        """Documents and positions [N, L] for every token."""
        if not self.borders:
            return numpy.empty(shape, dtype=numpy.int64), numpy.empty(shape, dtype=numpy.int64)
        size = shape[0] * shape[1]
        begins = numpy.concatenate(self.borders)
        lengths = numpy.diff(begins, append=size)
        counts = numpy.array(self.counts)
        first = numpy.array(self.first) - (numpy.cumsum(counts) - counts)
        documents = numpy.repeat(numpy.repeat(first, counts) + numpy.arange(len(begins)), lengths)
        positions = numpy.arange(size) - numpy.repeat(begins, lengths)
        return documents.reshape(shape), positions.reshape(shape)


class PackedRows:
    """Row i holds the tokens i * length up to (i + 1) * length of the split.

    A document that does not fit continues in the next row, where its positions begin at 0 again: a row knows nothing of
    what lies outside it. `documents` tells the documents of a row apart, unless `joined`: then a row is one document.
    The tokens after the last whole row are left out, or with `padded` make one more row, filled up with padding.
    """

    def __init__(self, split: TokenSplit, *, length: int, joined: bool = False, padded: bool = False) -> None:
        if length < 1:
            raise ValueError(f"the length of a row must be at least 1, got {length}")
        self.split, self.length, self.joined = split, length, joined
        self.count = -(-split.tokens // length) if padded else split.tokens // length
        if self.count == 0:
            raise ValueError(
                f"split {split.name!r} has {split.tokens} tokens in {split.documents} documents, too few for a row of "
                f"{length}; use shorter rows or more text"
            )
        self._arange = numpy.arange(length, dtype=numpy.int64)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Row:
        if not -self.count <= index < self.count:
            raise IndexError(f"the number of a row must be between 0 and {self.count - 1}, got {index}")
        whole = self.batch([index % self.count])
        return Row(whole.input_ids[0], whole.documents[0], whole.positions[0])

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(self.count))

    def batch(self, indices: ArrayLike) -> Rows:
        """The rows of these numbers [N], in this order."""
        numbers = numpy.asarray(indices, dtype=numpy.int64)
        if numbers.ndim != 1:
            raise ValueError(f"row numbers must be a list, got an array of shape {numbers.shape}")
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < self.count:
            raise IndexError(
                f"row numbers must be between 0 and {self.count - 1}, got {numbers.min()} to {numbers.max()}"
            )
        starts = numbers * self.length
        shards = self.split.token_offsets.searchsorted(starts, side="right") - 1
        input_ids = numpy.empty((len(numbers), self.length), dtype=numpy.int64)
        runs = Runs([], [], [])
        for row, (start, shard) in enumerate(zip(starts.tolist(), shards.tolist(), strict=True)):
            self._fill(input_ids[row], start, shard, row * self.length, runs)
        if self.joined:
            documents = numpy.repeat(numbers, self.length).reshape(input_ids.shape)
            positions = numpy.tile(self._arange, (len(numbers), 1))
        else:
            documents, positions = runs.spread(input_ids.shape)
        self._mark_padding(numbers, documents, positions)
        return Rows(input_ids, documents, positions)

    def answers(self, indices: ArrayLike) -> RowAnswers:
        """The questions of a probe in these rows; in rows shorter than its texts, a fact may lie in an earlier row."""
        answers = self.split.answers
        if answers is None:
            raise ValueError("these data hold no questions; make some with 'varifocal data probe'")
        numbers = numpy.asarray(indices, dtype=numpy.int64)
        starts = numbers * self.length
        begin = numpy.searchsorted(answers.tokens, starts)
        end = numpy.searchsorted(answers.tokens, starts + self.length)
        found = numpy.concatenate([numpy.arange(a, b) for a, b in zip(begin, end, strict=True)] or [numpy.empty(0)])
        found = found.astype(numpy.int64)
        rows = numpy.repeat(numpy.arange(len(numbers)), end - begin)
        return RowAnswers(rows, answers.tokens[found] - starts[rows], answers.distances[found])

    def _fill(self, into: NDArray[numpy.int64], start: int, number: int, flat: int, runs: Runs) -> None:
        """Copy the tokens from `start` on, which lies in shard `number`, and note the runs of documents in them."""
        split = self.split
        begin, filled, count = start - int(split.token_offsets[number]), 0, 1
        runs.borders.append(numpy.array([flat]))
        while filled < self.length and number < len(split.shards):
            shard = split.shards[number]
            end = min(begin + self.length - filled, len(shard.tokens))
            into[filled : filled + end - begin] = shard.read(begin, end)
            if not self.joined:
                # The documents in which the first and the last token of this part lie.
                low, high = shard.ends.searchsorted((begin, end - 1), side="right").tolist()
                # The first run of a row has its border already; a new shard always begins a new document.
                if filled == 0:
                    runs.first.append(int(split.document_offsets[number]) + low)
                else:
                    runs.borders.append(numpy.array([flat + filled]))
                    count += 1
                if high > low:
                    runs.borders.append(shard.ends[low:high] + (flat + filled - begin))
                    count += high - low
            filled += end - begin
            begin, number = 0, number + 1
        runs.counts.append(count)
        into[filled:] = split.end

    def _mark_padding(
        self, numbers: NDArray[numpy.int64], documents: NDArray[numpy.int64], positions: NDArray[numpy.int64]
    ) -> None:
        left = self.split.tokens - (self.count - 1) * self.length
        if left < self.length:
            last = numbers == self.count - 1
            documents[last, left:] = PADDING
            positions[last, left:] = 0
