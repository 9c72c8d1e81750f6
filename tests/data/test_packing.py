"""Rows against the documents they were cut from, one token at a time."""

from __future__ import annotations

import numpy
import pytest

from varifocal.data import PADDING, PreparedData, TokenSplit


def slow_rows(split: TokenSplit, length: int) -> list[list[tuple[int, int, int]]]:
    """(token, document, position) of every place of every whole row, by the definition."""
    places = [(int(token), number) for number in range(split.documents) for token in split.document(number)]
    rows = []
    for begin in range(0, len(places) - length + 1, length):
        row: list[tuple[int, int, int]] = []
        for token, document in places[begin : begin + length]:
            position = row[-1][2] + 1 if row and row[-1][1] == document else 0
            row.append((token, document, position))
        rows.append(row)
    return rows


@pytest.mark.parametrize("length", [1, 2, 7, 128, 1000, 40_000])
def test_rows_follow_the_definition(data: PreparedData, length: int) -> None:
    split = data.split("validation")
    assert len(split.shards) > 1
    rows, wanted = split.rows(length=length), numpy.array(slow_rows(split, length))
    assert len(rows) == len(wanted)
    found = numpy.stack(rows.batch(numpy.arange(len(rows))), axis=-1)
    numpy.testing.assert_array_equal(found, wanted)


def test_rows_cross_shards(data: PreparedData) -> None:
    split = data.split("train")
    border = int(split.token_offsets[1])
    rows = split.rows(length=100)
    row = rows[border // 100]
    assert border % 100 > 0
    numpy.testing.assert_array_equal(row.input_ids[: border % 100], split.shards[0].tokens[-(border % 100) :])
    assert row.input_ids[border % 100 - 1] == split.end
    assert row.positions[border % 100] == 0
    assert row.documents[border % 100] == split.document_offsets[1]


def test_batch_keeps_the_order_that_was_asked_for(data: PreparedData) -> None:
    rows = data.split("train").rows(length=64)
    chosen = [5, 0, len(rows) - 1, 5]
    batch = rows.batch(chosen)
    for place, number in enumerate(chosen):
        for found, wanted in zip(batch, rows[number], strict=True):
            numpy.testing.assert_array_equal(found[place], wanted)
    assert {array.dtype for array in batch} == {numpy.dtype(numpy.int64)}


def test_joined_row_is_one_document(data: PreparedData) -> None:
    split = data.split("train")
    batch = split.rows(length=512, joined=True).batch([0, 3])
    numpy.testing.assert_array_equal(batch.input_ids, split.rows(length=512).batch([0, 3]).input_ids)
    numpy.testing.assert_array_equal(batch.positions, numpy.tile(numpy.arange(512), (2, 1)))
    assert [set(row.tolist()) for row in batch.documents] == [{0}, {3}]


@pytest.mark.parametrize("joined", [False, True])
def test_padded_rows_lose_no_token(data: PreparedData, joined: bool) -> None:
    split = data.split("test")
    rows = split.rows(length=300, padded=True, joined=joined)
    whole = rows.batch(numpy.arange(len(rows)))
    real = whole.documents != PADDING
    assert real.sum() == split.tokens
    assert not real[-1, -1]
    assert whole.input_ids[real][-1] == split.end
    assert (whole.positions[~real] == 0).all()


def test_last_tokens_are_left_out_without_padding(data: PreparedData) -> None:
    split = data.split("test")
    assert len(split.rows(length=300)) == split.tokens // 300


def test_negative_numbers_count_from_the_end(data: PreparedData) -> None:
    rows = data.split("test").rows(length=50)
    numpy.testing.assert_array_equal(rows[-1].input_ids, rows[len(rows) - 1].input_ids)


@pytest.mark.parametrize("index", [10**9, -(10**9)])
def test_row_that_does_not_exist_is_an_index_error(data: PreparedData, index: int) -> None:
    with pytest.raises(IndexError, match=r"a row must be between 0 and \d+, got -?\d+"):
        data.split("test").rows(length=50)[index]


def test_iterating_rows_ends(data: PreparedData) -> None:
    rows = data.split("test").rows(length=500)
    assert len(list(rows)) == len(rows)


def test_empty_batch_has_no_rows(data: PreparedData) -> None:
    assert [array.shape for array in data.split("test").rows(length=50).batch([])] == [(0, 50)] * 3


@pytest.mark.parametrize(
    ("length", "sentence"), [(0, "at least 1, got 0"), (10**7, "too few for a row of 10000000; use shorter rows")]
)
def test_impossible_length_is_explained(data: PreparedData, length: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        data.split("test").rows(length=length)
