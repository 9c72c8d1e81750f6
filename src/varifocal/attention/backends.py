"""The ways to evaluate a problem, by name: a named backend runs or says why not; only "auto" selects one.

A backend is a module with two things: `HONOURS`, the parts of a Problem that it knows, and `prepare(problem)`, which
classifies the problem once and returns either what runs it or the reason why it cannot, as the end of a sentence.
A part that a backend does not list is never ignored: where a problem makes use of it, the backend is refused.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, Protocol, cast

import torch

from varifocal.equations.problem import DivergenceProblem, PoolingProblem, Problem, SummaryProblem

Run = Callable[[], Any]
"""Evaluates the problem that it was prepared for."""
Parts = tuple[list[str], list[tuple[str, Any]]]
"""Names of parts, and names of parts with what they are by default."""


class BackendModule(Protocol):
    """What the module of a backend offers."""

    HONOURS: frozenset[str]

    def prepare(self, problem: Any) -> Run | str:
        """What runs the problem, or why it cannot be run here."""


@dataclass(frozen=True)
class Backend:
    """One way to evaluate problems."""

    name: str
    module: str
    """Imported when the backend is first asked for."""
    volunteers_on: tuple[str, ...] | None = None
    """The kinds of device on which "auto" takes it; None for all."""

    def prepare(self, problem: Any) -> Run | str:
        """What runs the problem, or why this backend cannot, as the end of a sentence."""
        assert is_loaded(self.module)
        module = LOADED[self.module]
        for part in used_parts(problem):
            if part not in module.HONOURS:
                return f"does not know the {part} of a problem"
        return module.prepare(problem)


LOADED: dict[str, BackendModule] = {}
"""The modules of backends that were asked for."""


def is_loaded(name: str) -> bool:
    """Import the module of a backend, unless it is there already."""
    if name not in LOADED:
        LOADED[name] = cast(BackendModule, importlib.import_module(name))
    return True


# torch.compile cannot trace an import: it calls this function while it traces, and takes its answer as it is.
# (torch.compiler's decorator to that end would import the compiler here.)
is_loaded._dynamo_marked_constant = True  # type: ignore[attr-defined]


def used_parts(problem: Any) -> list[str]:
    """The names of the parts in which a problem differs from what its type assumes by itself."""
    if type(problem) not in PARTS:
        PARTS[type(problem)] = parts_of(type(problem))
    required, defaults = PARTS[type(problem)]
    return required + [name for name, default in defaults if getattr(problem, name) != default]


def parts_of(kind: type[Any]) -> Parts:
    """The parts that every problem of a kind has, and those with a default, which it may leave out."""
    required: list[str] = []
    defaults: list[tuple[str, Any]] = []
    for part in fields(kind):
        if part.default_factory is not MISSING:
            defaults.append((part.name, part.default_factory()))
        elif part.default is not MISSING:
            defaults.append((part.name, part.default))
        else:
            required.append(part.name)
    return required, defaults


PARTS: dict[type[Any], Parts] = {
    kind: parts_of(kind) for kind in (Problem, DivergenceProblem, PoolingProblem, SummaryProblem)
}


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("native", "varifocal.kernels.native.backend", volunteers_on=("cpu",)),
        Backend("flex", "varifocal.kernels.flex.backend", volunteers_on=("cuda",)),
        # Never launched on a GPU: by name only, until somebody has.
        Backend("triton", "varifocal.kernels.triton.backend", volunteers_on=()),
        Backend("reference", "varifocal.equations.reference_backend"),
    )
}
"""In the order in which "auto" tries them."""


class ReferenceWarning(UserWarning):
    """ "auto" took the reference for a problem whose scores of all pairs take much memory and time."""


MANY_PAIRS = 1 << 24
"""Pairs of query and key, over all heads: their scores take 64 MB in float32."""
WARNED: set[str] = set()
"""Reasons that were told already."""


def warn_of_reference(problem: Any, reason: str) -> None:
    """Say once, for each reason, that the reference runs a large problem, and what that costs."""
    if not isinstance(problem, Problem) or torch.compiler.is_compiling() or reason in WARNED:
        return
    batch, heads, queries, _ = problem.q.shape
    keys = problem.k.shape[2]
    if queries == 1 or batch * heads * queries * keys < MANY_PAIRS:
        return
    WARNED.add(reason)
    size = batch * heads * queries * keys * max(4, problem.q.element_size()) / 1e6
    warnings.warn(
        f"the reference computes this attention, because backend 'native' {reason}; it writes out all "
        f"{queries:,} x {keys:,} scores of {batch * heads} heads, {size:,.0f} MB each time, and is many times slower "
        "than a kernel; backend='reference' says that this is meant",
        ReferenceWarning,
        stacklevel=2,
    )


class UnavailableError(ValueError):
    """The backend that was asked for by name, or every backend, cannot run the problem; the message says why."""


def prepare(name: str, problem: Any, *, device: str) -> Run:
    """What evaluates a problem on the named backend, or for "auto" on the first that can.

    Args:
        name: of a backend, or "auto".
        problem: a Problem, or another of the problems of equations/problem.py.
        device: the kind of device that its tensors are on.
    """
    if name == "auto" and torch.compiler.is_exporting():
        # An exported program runs where this package is not: it may hold torch's own operators alone.
        name = "reference"
    if name == "auto":
        reasons: list[tuple[str, str]] = []
        for backend in BACKENDS.values():
            if backend.volunteers_on is None or device in backend.volunteers_on:
                run = backend.prepare(problem)
                if not isinstance(run, str):
                    if backend.name == "reference" and device == "cpu" and reasons:
                        warn_of_reference(problem, reasons[0][1])
                    return run
                reasons.append((backend.name, run))
        told = "; ".join(f"backend {tried!r} {reason}" for tried, reason in reasons)
        raise UnavailableError(f"no backend can run this problem on {device}: {told}")
    if name not in BACKENDS:
        known = ", ".join(f"'{known}'" for known in ("auto", *BACKENDS))
        raise ValueError(f"unknown backend {name!r}; known are {known}")
    run = BACKENDS[name].prepare(problem)
    if isinstance(run, str):
        raise UnavailableError(f"backend {name!r} {run}; use backend='auto' or 'reference'")
    return run
