"""How much a mechanism reads and multiplies: what its attention costs, apart from how fast a kernel is."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from varifocal.attention.mechanisms import Mechanism
from varifocal.attention.mechanisms.base import typical_equation
from varifocal.equations.equation import Equation


class Work(NamedTuple):
    """The forward work of one layer's attention for an average query of a text, all heads together."""

    keys_read: float
    """Keys (or summaries) of one head whose values are mixed; learned widths count as the middle of their range."""
    reading_flops: float
    """q.k and p v over the keys read: 4 D for each key and head."""
    ranking_flops: float
    """Products that only decide which keys are read; they have no backward pass."""
    weighing_flops: float
    """Products that decide how much a key counts: gates, pair networks, summaries, an indexer's projections."""

    @property
    def rating_flops(self) -> float:
        """Ranking and weighing together."""
        return self.ranking_flops + self.weighing_flops


def work(mechanism: Mechanism[Any], length: int) -> Work:
    """The mean work of the queries of a text of `length` tokens, counted from the mechanism's equation."""
    return work_of(mechanism, typical_equation(mechanism, length), length)


def work_of(mechanism: Mechanism[Any], equation: Equation, length: int) -> Work:
    """The same, for an equation that is known already."""
    shape, place = mechanism.shape, torch.arange(length)
    keys = equation.keys_read(place)
    ranking = weighing = 0.0
    for branch in equation.branches:
        flops = shape.heads * float(branch.rating_flops(place, shape.head_width).double().mean())
        if branch.ranks:
            ranking += flops
        else:
            weighing += flops
    weighing += mechanism.rating_flops() + shape.heads * keys * equation.score.pair_flops()
    return Work(keys, 4 * shape.head_width * shape.heads * keys, ranking, weighing)
