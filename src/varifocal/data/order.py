"""A permutation of any number of rows that is computed, not stored: entry by entry, from seed and epoch."""

from __future__ import annotations

from functools import lru_cache

import numpy
from numpy.typing import ArrayLike, NDArray

ROUNDS = 6
"""Four rounds of a Feistel network already pass for random; short halves (small data) want more."""
BLOCK = 4096


def shuffled(places: ArrayLike, *, count: int, seed: int, epoch: int) -> NDArray[numpy.int64]:
    """The row numbers at these places of the shuffled order of 0 to count - 1.

    A Feistel network permutes the next power of 4; a result of `count` or more is permuted again until it falls below,
    which leaves a permutation of the first `count` numbers. Needs no memory and no other row.
    """
    values = numpy.asarray(places, dtype=numpy.int64)
    if values.size and not 0 <= values.min() <= values.max() < count:
        raise ValueError(f"places must be between 0 and {count - 1}, got {values.min()} to {values.max()}")
    # Half the bits of the next power of 4, since both halves of a Feistel network have one width.
    half = numpy.uint64(max(1, (max(count - 1, 1).bit_length() + 1) // 2))
    keys = round_keys(seed, epoch)
    result = feistel(values.astype(numpy.uint64), half, keys)
    outside = result >= count
    while outside.any():
        result[outside] = feistel(result[outside], half, keys)
        outside = result >= count
    return result.astype(numpy.int64)


def stretch(begin: int, end: int, *, count: int, seed: int, epoch: int) -> NDArray[numpy.int64]:
    """The row numbers at the places begin to end of the shuffled order."""
    if not 0 <= begin <= end <= count:
        raise ValueError(f"places must be between 0 and {count}, got {begin} to {end}")
    blocks = [block(number, count, seed, epoch) for number in range(begin // BLOCK, -(-end // BLOCK))]
    first = begin // BLOCK * BLOCK
    return numpy.concatenate([*blocks, numpy.empty(0, dtype=numpy.int64)])[begin - first : end - first]


@lru_cache(maxsize=16)
def block(number: int, count: int, seed: int, epoch: int) -> NDArray[numpy.int64]:
    """A part of the shuffled order; computing many places at once costs little more than computing a few."""
    return shuffled(numpy.arange(number * BLOCK, min((number + 1) * BLOCK, count)), count=count, seed=seed, epoch=epoch)


def feistel(values: NDArray[numpy.uint64], half: numpy.uint64, keys: NDArray[numpy.uint64]) -> NDArray[numpy.uint64]:
    """One pass over numbers of 2 * half bits."""
    mask = (numpy.uint64(1) << half) - numpy.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (mix(right + key) & mask)
    return (left << half) | right


def round_keys(seed: int, epoch: int) -> NDArray[numpy.uint64]:
    """A key for each round; every seed and epoch has its own."""
    state = numpy.random.SeedSequence([seed, epoch]).generate_state(ROUNDS, dtype=numpy.uint64)
    return numpy.asarray(state, dtype=numpy.uint64)


def mix(values: NDArray[numpy.uint64]) -> NDArray[numpy.uint64]:
    """The finalizer of SplitMix64: every bit of the result depends on every bit given."""
    values = (values ^ (values >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return values ^ (values >> numpy.uint64(31))
