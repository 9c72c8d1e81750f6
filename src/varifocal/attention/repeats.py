"""Calls like one before: answered at once, with nothing looked at again but values.

The checks, the layout and the choice of kernels of a call take longer than a kernel that reads a thousand keys for one
query. They look at shapes and types, which the next decoded token has in common with this one.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast

import torch

from varifocal.attention.backends import BACKENDS, LOADED
from varifocal.attention.checks import check_finite
from varifocal.equations.branches import SoftWindow, members
from varifocal.equations.equation import Equation
from varifocal.equations.problem import Asked, Attended

NATIVE = BACKENDS["native"].module
ASKED = {"branches", "weights", "score", "losses"}
"""The parts of an equation that an `Asked` brings along, and its losses, which are no part of attention."""
OTHERS = tuple(part.name for part in fields(Equation) if part.name not in ASKED)


def is_plain(equation: Equation) -> bool:
    """Whether an equation has no other parts, so that an `Asked` says all of it; never while it is compiled."""
    return not torch.compiler.is_compiling() and all(getattr(equation, name) is None for name in OTHERS)


def answer_again(asked: Asked, backend: str) -> Attended | None:
    """The answer to a call, if one of its kind was answered before; ValueError for weights that are not finite."""
    native = cast(Any, LOADED.get(NATIVE))
    if native is None or backend not in ("auto", "native"):
        return None
    run = native.recall(asked)
    if run is None:
        return None
    if asked.weights is not None:
        check_finite("weights", asked.weights)
    for branch in asked.branches:
        for member in members(branch):
            if isinstance(member, SoftWindow):
                check_finite("SoftWindow.width", member.width)
    return cast(Attended, run(asked))


def learn(asked: Asked, backend: str) -> None:
    """Remember the kind of a call that has just been answered."""
    native = cast(Any, LOADED.get(NATIVE))
    if native is not None and backend in ("auto", "native"):
        native.learn(asked)
