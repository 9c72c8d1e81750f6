"""The order of batches: a permutation for each epoch, shared among ranks, resumable at any step."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varifocal.bench.data.synthetic import write_synthetic
from varifocal.data import Batches, PackedRows, PreparedData, open_data
from varifocal.data.order import BLOCK, shuffled, stretch


@pytest.fixture(scope="module")
def rows(data: PreparedData) -> PackedRows:
    return data.split("train").rows(length=128)


@settings(deadline=None, max_examples=40)
@given(count=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 50))
def test_shuffled_order_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    order = shuffled(numpy.arange(count), count=count, seed=seed, epoch=epoch)
    numpy.testing.assert_array_equal(numpy.sort(order), numpy.arange(count))


def test_place_is_computed_without_the_others() -> None:
    count = 10**12
    places = [0, 1, 999, count - 1]
    alone = [int(shuffled([place], count=count, seed=3, epoch=1)[0]) for place in places]
    assert alone == shuffled(places, count=count, seed=3, epoch=1).tolist()
    assert all(0 <= number < count for number in alone)


@pytest.mark.parametrize(
    ("begin", "end"), [(0, 10), (BLOCK - 3, BLOCK + 3), (2 * BLOCK, 2 * BLOCK), (5, 3 * BLOCK + 1)]
)
def test_stretch_is_part_of_the_order(begin: int, end: int) -> None:
    count = 4 * BLOCK + 17
    order = shuffled(numpy.arange(count), count=count, seed=9, epoch=2)
    numpy.testing.assert_array_equal(stretch(begin, end, count=count, seed=9, epoch=2), order[begin:end])


def test_shuffled_order_looks_random() -> None:
    count = 10_000
    order = shuffled(numpy.arange(count), count=count, seed=0, epoch=0)
    # Neighbours, halves and fixed points, each within five standard deviations of a uniform permutation.
    steps = numpy.abs(numpy.diff(order))
    assert abs(steps.mean() - count / 3) < 5 * count / 3 / count**0.5
    assert abs((order[: count // 2] < count // 2).mean() - 0.5) < 5 * 0.5 / (count // 2) ** 0.5
    assert (order == numpy.arange(count)).sum() < 8


def test_order_of_a_seed_never_changes() -> None:
    # Fixed values: a resumed run must find the order it began with, whatever version it runs.
    assert shuffled(numpy.arange(8), count=1000, seed=7, epoch=3).tolist() == [670, 352, 982, 756, 838, 462, 168, 583]


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    orders = {tuple(shuffled(numpy.arange(20), count=5000, seed=s, epoch=e)) for s in range(4) for e in range(4)}
    assert len(orders) == 16


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_read_every_row_once(rows: PackedRows, world_size: int, shuffle: bool) -> None:
    ranks = [
        Batches(rows, batch_size=4, rank=rank, world_size=world_size, shuffle=shuffle, drop_last=False, seed=5)
        for rank in range(world_size)
    ]
    read = numpy.concatenate([rank.indices(step) for rank in ranks for step in range(len(rank))])
    numpy.testing.assert_array_equal(numpy.sort(read), numpy.arange(len(rows)))


def test_epoch_repeats_no_row_when_the_last_step_is_dropped(rows: PackedRows) -> None:
    ranks = [Batches(rows, batch_size=3, rank=rank, world_size=2) for rank in range(2)]
    read = numpy.concatenate([rank.indices(step) for rank in ranks for step in range(len(rank))])
    assert len(set(read.tolist())) == len(read) == len(rows) // 6 * 6


def test_ranks_together_read_what_one_rank_would(rows: PackedRows) -> None:
    alone = Batches(rows, batch_size=12, seed=2)
    ranks = [Batches(rows, batch_size=3, seed=2, rank=rank, world_size=4) for rank in range(4)]
    for step in (0, 1, len(alone) - 1):
        together = numpy.concatenate([rank.indices(step) for rank in ranks])
        numpy.testing.assert_array_equal(together, alone.indices(step))


def test_resumed_batches_are_those_of_an_unbroken_run(rows: PackedRows) -> None:
    whole = list(Batches(rows, batch_size=8, seed=1, epochs=2))
    for start in (1, len(whole) // 2 - 1, len(whole) // 2 + 1, len(whole) - 1):
        rest = list(Batches(rows, batch_size=8, seed=1, epochs=2, start_step=start))
        assert len(rest) == len(whole) - start
        for found, wanted in zip(rest, whole[start:], strict=True):
            numpy.testing.assert_array_equal(found, wanted)


def test_every_epoch_has_its_own_order(rows: PackedRows) -> None:
    batches = Batches(rows, batch_size=8, epochs=2)
    assert batches.indices(0).tolist() != batches.indices(batches.steps_per_epoch).tolist()


def test_batches_without_end_go_on(rows: PackedRows) -> None:
    batches = Batches(rows, batch_size=8, epochs=None, start_step=10**9)
    assert next(iter(batches)).input_ids.shape == (8, 128)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_size": 1, "rank": 2, "world_size": 2}, "rank must be between 0 and 1, got 2"),
        ({"batch_size": 10**9}, "do not fill one step"),
        ({"batch_size": 1, "start_step": -1}, "start_step and seed must be at least 0"),
    ],
)
def test_impossible_batches_are_explained(rows: PackedRows, options: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Batches(rows, **options)  # type: ignore[arg-type]


def test_step_after_the_last_is_an_index_error(rows: PackedRows) -> None:
    batches = Batches(rows, batch_size=8)
    with pytest.raises(IndexError, match="step"):
        batches.indices(len(batches))


def peak_of_reading(folder: Path, tokens: int) -> int:
    """The most memory, in bytes, that opening data of that many tokens and reading 50 batches takes at a time."""
    write_synthetic(folder, tokens=tokens)
    tracemalloc.start()
    try:
        batches = Batches(open_data(folder).split("train").rows(length=512), batch_size=4, epochs=None)
        for step in range(50):
            batches.at(step)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    peak_of_reading(tmp_path / "warm", 1 << 19)
    small, large = peak_of_reading(tmp_path / "small", 1 << 20), peak_of_reading(tmp_path / "large", 1 << 24)
    # 30 MB more on the disk; the table of checksums and a part of the shuffled order may differ a little.
    assert large - small < 200_000
