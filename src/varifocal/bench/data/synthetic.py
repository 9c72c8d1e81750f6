"""A data set to measure on when none is given: random tokens in documents about as long as those of the web."""

from __future__ import annotations

from pathlib import Path

import numpy

from varifocal.data import PreparedData, open_data
from varifocal.data.arrays import SplitArrays, write_arrays
from varifocal.data.tokenizers import find_tokenizer


def write_synthetic(folder: Path, *, tokens: int, seed: int = 0) -> PreparedData:
    """`tokens` tokens of two bytes, lengths of documents log-normal: half below 400 tokens, one in 30 above 4000."""
    generator = numpy.random.default_rng(seed)
    lengths = numpy.exp(generator.normal(6.0, 1.25, size=max(16, tokens // 300))).astype(numpy.int64) + 2
    ends = numpy.cumsum(lengths)
    ends = numpy.append(ends[ends < tokens], tokens)
    values = generator.integers(0, 256, tokens, dtype=numpy.uint16)
    values[ends - 1] = 256
    write_arrays(
        folder,
        {"train": SplitArrays(values, ends, ends - numpy.arange(1, len(ends) + 1))},
        kind="text",
        source={"kind": "synthetic", "tokens": tokens, "seed": seed},
        tokenizer=find_tokenizer("bytes"),
    )
    return open_data(folder)
