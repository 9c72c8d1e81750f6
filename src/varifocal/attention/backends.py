"""The ways to evaluate a problem, by name: a named backend runs or says why not; only "auto" chooses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from varifocal.equations.problem import Attended, Problem
from varifocal.equations.reference import attend_reference
from varifocal.kernels.flex import backend as flex
from varifocal.kernels.native import backend as native


@dataclass(frozen=True)
class Backend:
    """One way to evaluate a problem."""

    name: str
    run: Callable[[Problem], Attended]
    why_not: Callable[[Problem], str | None]
    """Why this backend cannot run a problem, as the end of a sentence; None if it can."""
    chosen_on: tuple[str, ...] | None = None
    """The kinds of device on which "auto" takes it; None for all."""

    def volunteers(self, problem: Problem) -> bool:
        """Whether "auto" may take it."""
        offered = self.chosen_on is None or problem.q.device.type in self.chosen_on
        return offered and self.why_not(problem) is None


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("native", run=native.attend_native, why_not=native.why_not, chosen_on=("cpu",)),
        Backend("flex", run=flex.attend_flex, why_not=flex.why_not, chosen_on=("cuda",)),
        Backend("reference", run=attend_reference, why_not=lambda problem: None),
    )
}
"""In the order in which "auto" tries them."""


class UnavailableError(ValueError):
    """A backend that was asked for by name cannot run the problem; the message says why."""


def choose_backend(name: str, problem: Problem) -> Backend:
    """The named backend, or for "auto" the first that can run the problem."""
    if name == "auto":
        return next(backend for backend in BACKENDS.values() if backend.volunteers(problem))
    if name not in BACKENDS:
        known = ", ".join(f"'{known}'" for known in ("auto", *BACKENDS))
        raise ValueError(f"unknown backend {name!r}; known are {known}")
    reason = BACKENDS[name].why_not(problem)
    if reason is not None:
        raise UnavailableError(f"backend {name!r} {reason}; use backend='auto' or 'reference'")
    return BACKENDS[name]
