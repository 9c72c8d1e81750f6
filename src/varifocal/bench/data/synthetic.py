"""A data set to measure on when none is given: random tokens in documents about as long as web pages."""

from __future__ import annotations

from pathlib import Path

import numpy

from varifocal.data import PreparedData, open_data
from varifocal.data.arrays import SplitArrays, write_arrays
from varifocal.data.tokenizers import find_tokenizer


def write_synthetic(folder: Path, *, tokens: int, validation: int = 0, seed: int = 0) -> PreparedData:
    """A data set of `tokens` tokens of two bytes to train on, and `validation` tokens to validate on."""
    generator = numpy.random.default_rng(seed)
    wanted = {"train": tokens} | ({"validation": validation} if validation else {})
    write_arrays(
        folder,
        {name: random_documents(generator, count) for name, count in wanted.items()},
        kind="text",
        source={"kind": "synthetic", "tokens": tokens, "seed": seed},
        tokenizer=find_tokenizer("bytes"),
    )
    return open_data(folder)


def random_documents(generator: numpy.random.Generator, tokens: int) -> SplitArrays:
    """Documents with log-normal lengths: half are below 400 tokens, one in 30 is above 4000."""
    lengths = numpy.exp(generator.normal(6.0, 1.25, size=max(16, tokens // 300))).astype(numpy.int64) + 2
    ends = numpy.cumsum(lengths)
    ends = numpy.append(ends[ends < tokens], tokens)
    values = generator.integers(0, 256, tokens, dtype=numpy.uint16)
    values[ends - 1] = 256
    return SplitArrays(values, ends, ends - numpy.arange(1, len(ends) + 1))
