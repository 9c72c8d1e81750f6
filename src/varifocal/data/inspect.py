"""What a data set is like: how long its documents are, and how much of it lies beyond a window."""

from __future__ import annotations

from typing import Any

import numpy

from varifocal.data.dataset import PreparedData, TokenSplit
from varifocal.data.order import shuffled

COUNTED = 1 << 16
"""Documents up to this length are counted length by length, longer ones together: quantiles below it are exact."""
SHOWN = 160
"""Tokens of a document that a sample shows."""


def inspect_data(data: PreparedData, *, window: int = 512, samples: int = 3, seed: int = 0) -> dict[str, Any]:
    """A report of plain values: counts and histogram of each split, and samples. Reads the indexes, few tokens."""
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if samples < 0:
        raise ValueError(f"samples must be at least 0, got {samples}")
    manifest = data.manifest
    return {
        "report": "data",
        "kind": manifest.kind,
        "source": manifest.source.get("source", manifest.source).get("name", manifest.kind),
        "fingerprint": data.fingerprint,
        "tokenizer": {
            "name": manifest.tokenizer.name,
            "vocabulary": manifest.tokenizer.vocabulary,
            "fingerprint": manifest.tokenizer.fingerprint,
        },
        "left_out": manifest.skipped,
        "window": window,
        "splits": {
            name: describe_split(data.split(name), window) for name, entry in manifest.splits.items() if entry.documents
        },
        "samples": sample_documents(data, samples, seed),
    }


def describe_split(split: TokenSplit, window: int) -> dict[str, Any]:
    """Counts, quantiles and a histogram of document lengths, the end of each document included."""
    counts = numpy.zeros(COUNTED + 1, dtype=numpy.int64)
    documents = numpy.zeros(64, dtype=numpy.int64)
    tokens = numpy.zeros(64, dtype=numpy.int64)
    longest = longer = beyond = 0
    for lengths in split.document_lengths():
        counts += numpy.bincount(numpy.minimum(lengths, COUNTED), minlength=COUNTED + 1)
        # The power of two at or below a length; exact, unlike a logarithm.
        powers = numpy.frexp(lengths.astype(numpy.float64))[1] - 1
        documents += numpy.bincount(powers, minlength=64)
        tokens += numpy.bincount(powers, weights=lengths, minlength=64).astype(numpy.int64)
        longest = max(longest, int(lengths.max()))
        longer += int((lengths > window).sum())
        beyond += int(numpy.maximum(lengths - window, 0).sum())
    used = numpy.flatnonzero(documents)
    bins = range(int(used[0]), int(used[-1]) + 1)
    return {
        "documents": split.documents,
        "tokens": split.tokens,
        "bytes": split.bytes,
        "bytes_per_token": split.bytes / split.tokens,
        "mean_length": split.tokens / split.documents,
        "quantiles": {str(share): quantile(counts, share) for share in (0.1, 0.5, 0.9)},
        "longest": longest,
        "documents_longer_than_window": longer / split.documents,
        "tokens_beyond_window": beyond / split.tokens,
        "histogram": [
            {
                "from": 1 << power,
                "to": (2 << power) - 1,
                "documents": int(documents[power]),
                "tokens": int(tokens[power]),
            }
            for power in bins
        ],
    }


def quantile(counts: Any, share: float) -> int:
    """The length that the share of documents does not exceed; COUNTED stands for that and anything longer."""
    below = numpy.cumsum(counts)
    return int(numpy.searchsorted(below, share * below[-1]))


def sample_documents(data: PreparedData, samples: int, seed: int) -> list[dict[str, Any]]:
    """The beginnings of some documents of the train split (or of the first that has any), decoded."""
    names = [name for name, entry in data.manifest.splits.items() if entry.documents]
    if not samples or not names:
        return []
    split, tokenizer = data.split(names[0]), data.tokenizer()
    numbers = shuffled(numpy.arange(min(samples, split.documents)), count=split.documents, seed=seed, epoch=0)
    found = []
    for number in numbers.tolist():
        tokens = split.document(number)
        shown = tokens[:SHOWN] if len(tokens) > SHOWN else tokens[:-1]
        found.append(
            {
                "split": split.name,
                "document": number,
                "tokens": len(tokens),
                "bytes": split.document_bytes(number),
                "text": tokenizer.decode(shown),
            }
        )
    return found
