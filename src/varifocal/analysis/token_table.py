"""Tokens with what was observed at each of them: the table that statistics are made from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

Numbers = NDArray[numpy.float64]


@dataclass(frozen=True, eq=False)
class TokenTable:
    """N tokens of several documents, and U values at each: one for every layer and head."""

    documents: NDArray[numpy.int64]
    """[N]: the document of the token. Tokens of one document are not independent; documents are assumed to be."""
    positions: NDArray[numpy.int64]
    """[N]: how many tokens of the document the model sees before it."""
    kinds: NDArray[numpy.bool_]
    """[N, K]: the kinds of the token."""
    values: NDArray[numpy.float32]
    """[N, U]: NaN where a value means nothing."""

    def __post_init__(self) -> None:
        lengths = {len(part) for part in (self.documents, self.positions, self.kinds, self.values)}
        if len(lengths) != 1:
            raise ValueError(
                f"a table of tokens needs one row for each token in every array, got {sorted(lengths)} rows"
            )


def position_bins(positions: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
    """0, 1, 2-3, 4-7, ... as 0, 1, 2, 3, ...: the number of bits."""
    return numpy.maximum(numpy.frexp(positions.astype(numpy.float64))[1], 0).astype(numpy.int64)


def bin_edges(place: int) -> tuple[int, int]:
    """The least and the largest position of a bin."""
    return (0, 0) if place == 0 else (1 << (place - 1), (1 << place) - 1)
