"""Our own rows of a benchmark: every registered mechanism, in each of its ways to run."""

from __future__ import annotations

from typing import Any

import torch

from varifocal.attention.attend import lay_out
from varifocal.attention.backends import BACKENDS
from varifocal.attention.mechanisms import MECHANISMS, Mechanism, make_mechanism
from varifocal.attention.mechanisms.base import typical_equation
from varifocal.equations.equation import Equation
from varifocal.equations.problem import Problem

REFERENCE = "reference"


def rows_of_ours() -> dict[str, tuple[str, dict[str, Any]]]:
    """By name: a mechanism and its options. A mechanism with several ways to run has a row for each of them."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, kind in MECHANISMS.items():
        if kind.ways:
            found |= {f"{name} {label}": (name, dict(way)) for label, way in kind.ways.items()}
        else:
            found[name] = (name, {})
    return found


def row_mechanism(name: str) -> Mechanism[Any]:
    """The mechanism of a row of ours."""
    stem, options = rows_of_ours()[name]
    return make_mechanism(stem, **options)


def serves(backend: str, equation: Equation, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether a backend runs an equation on queries, keys and values like these."""
    problem = Problem(
        q=q.detach(), k=k.detach(), v=v.detach(), branches=equation.branches, weights=equation.weights,
        score=equation.score, layout=lay_out(q, k, v), normalizer=equation.normalizer,
        relative_values=equation.relative_values,
    )  # fmt: skip
    return not isinstance(BACKENDS[backend].prepare(problem), str)


def has_kernel(mechanism: Mechanism[Any], device: str) -> bool:
    """Whether any backend but the reference, which is not made for speed, runs a mechanism on a kind of device."""
    length, shape = 2, mechanism.shape
    q = torch.zeros(1, shape.heads, length, shape.head_width, device=device)
    k = torch.zeros(1, shape.kv_heads, length, shape.head_width, device=device)
    equation = typical_equation(mechanism.to(device), length)
    volunteers = (one for one in BACKENDS.values() if one.volunteers_on is not None and device in one.volunteers_on)
    return any(serves(one.name, equation, q, k, k) for one in volunteers)


def is_worth_timing(mechanism: Mechanism[Any], device: str) -> bool:
    """Whether a kernel runs a mechanism; where there are no kernels at all, the reference is timed instead."""
    return has_kernel(mechanism, device) or not has_kernel(make_mechanism("dense"), device)
