"""What all branches share: a set of keys for each query, and unions of such sets."""

from __future__ import annotations

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


def members(branch: Branch) -> tuple[Branch, ...]:
    """The branches of a union, or the branch itself."""
    return branch.branches if isinstance(branch, Union) else (branch,)


def require_at_least(what: str, value: int | float, least: int | float) -> None:
    """ValueError unless `value` is at least `least`."""
    if not value >= least:
        raise ValueError(f"{what} must be at least {least}, got {value}")
