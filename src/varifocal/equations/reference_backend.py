"""The reference as a backend: it runs everything, slowly, and defines what the others must compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from varifocal.equations.divergence import indexer_divergence
from varifocal.equations.pooling import pool_keys, summarize
from varifocal.equations.problem import DivergenceProblem, PoolingProblem, Problem, SummaryProblem
from varifocal.equations.reference import attend_reference

HONOURS = frozenset(
    name for kind in (Problem, DivergenceProblem, PoolingProblem, SummaryProblem) for name in kind.__dataclass_fields__
)
"""Every part of every problem; shortcuts save work, and the reference saves none."""

EVALUATIONS: dict[type[Any], Callable[[Any], Any]] = {
    Problem: attend_reference,
    DivergenceProblem: indexer_divergence,
    PoolingProblem: pool_keys,
    SummaryProblem: summarize,
}


def prepare(problem: Any) -> Callable[[], Any] | str:
    """What runs the problem, or why it cannot be run."""
    if type(problem) not in EVALUATIONS:
        return f"does not know the problem {type(problem).__name__}"
    return partial(EVALUATIONS[type(problem)], problem)
