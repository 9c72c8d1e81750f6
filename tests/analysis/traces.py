"""Synthetic traces: gates of several documents with or without a pattern in them."""

from __future__ import annotations

import numpy

from varifocal.analysis.patterns import FAR_KINDS
from varifocal.analysis.token_kinds import KINDS
from varifocal.analysis.token_table import TokenTable

LAYERS, HEADS = 2, 3


def traces(*, planted: float = 0.0, seed: int = 0, documents: int = 20, length: int = 300) -> TokenTable:
    """Gates that wander from document to document, with numbers `planted` higher in head (1, 2) alone."""
    generator = numpy.random.default_rng(seed)
    tokens = documents * length
    kinds = generator.random((tokens, len(KINDS) + len(FAR_KINDS))) < 0.15
    kinds[:, 1] |= kinds[:, 2] | kinds[:, 5] | kinds[:, 6]
    belongs = numpy.repeat(numpy.arange(documents), length)
    own = generator.normal(0, 0.05, (documents, LAYERS * HEADS))[belongs]
    gates = 0.5 + own + generator.normal(0, 0.1, (tokens, LAYERS * HEADS))
    gates[:, 5] += planted * kinds[:, 3]
    return TokenTable(belongs, numpy.tile(numpy.arange(length), documents), kinds, gates.astype(numpy.float32))


def shuffled(table: TokenTable, seed: int = 0) -> TokenTable:
    """The same with the kinds of its tokens dealt out anew."""
    order = numpy.random.default_rng(seed).permutation(len(table.documents))
    return TokenTable(table.documents, table.positions, table.kinds[order], table.values)
