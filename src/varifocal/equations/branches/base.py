"""What all branches share: a set of keys for each query, and unions of such sets."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Branch:
    """The keys that one softmax of the mixture may read.

    Positions are counted from the start of the query's document, so a document reads the same keys alone,
    packed behind others or behind padding. Keys of other documents, of the future and of padding are never
    read, whatever a branch says.
    """

    def __or__(self, other: Branch) -> Union:
        """One softmax over the keys of both."""
        return Union((*members(self), *members(other)))


@dataclass(frozen=True)
class FixedBranch(Branch):
    """A branch whose set follows from positions alone."""

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        """bool: whether the query at place `query` reads the key at place `key` (0 <= key <= query)."""
        raise NotImplementedError


@dataclass(frozen=True)
class Union(Branch):
    """One softmax over the keys of several branches; a key's weight is the largest that a member gives it."""

    branches: tuple[Branch, ...]

    def __post_init__(self) -> None:
        for branch in self.branches:
            if not isinstance(branch, Branch):
                raise ValueError(f"a union joins branches such as Causal() or Window(256), got {branch!r}")
        if not self.branches:
            raise ValueError("a union needs at least one branch, got none")


def members(branch: Branch) -> tuple[Branch, ...]:
    """The branches of a union, or the branch itself."""
    return branch.branches if isinstance(branch, Union) else (branch,)


def require_at_least(what: str, value: int, least: int) -> None:
    """ValueError unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{what} must be a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{what} must be at least {least}, got {value}")


def require_finite(what: str, value: float, *, least: float) -> None:
    """ValueError unless `value` is a finite number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value < math.inf:
        raise ValueError(f"{what} must be a finite number, got {value!r}")
    if value < least:
        raise ValueError(f"{what} must be at least {least}, got {value}")
