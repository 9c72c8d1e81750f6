"""What all branches share: a set of keys for each query, unions of such sets, and what can be asked of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from varifocal.equations.kinds import refuse_known_parents

PAIRS_AT_ONCE = 1 << 22
"""Bounds the pairs of a query and a key that exist at once while keys are counted."""


@dataclass(frozen=True)
class Branch:
    """The keys that one softmax of the mixture may read.

    Positions are counted from the start of the query's document, so a document reads the same keys alone,
    packed after others or after padding. Keys of other documents, of the future and of padding are never
    read, whatever a branch says.

    Whoever wants to know what a branch reads asks it. `place` is int64 [..., T], the places of queries in their
    documents; answers are of the same shape, or [..., H, T] where heads differ.
    """

    def __init_subclass__(cls) -> None:
        refuse_known_parents(cls, "Branch", "FixedBranch")

    def __or__(self, other: Branch) -> Union:
        """One softmax over the keys of both."""
        return Union((*members(self), *members(other)))

    @property
    def follows_positions(self) -> bool:
        """Whether its keys need no ranking and no summary, so that branches of this kind can share one pass."""
        return False

    @property
    def ranks(self) -> bool:
        """Whether it selects keys, which has no gradient, instead of reading all that its set holds."""
        return False

    def near(self, place: Tensor) -> Tensor:
        """How many of the nearest keys, the query's own first, are all read with their full weight."""
        return torch.zeros_like(place)

    def first(self, place: Tensor) -> Tensor:
        """How many of the document's first keys are all read with their full weight."""
        return torch.zeros_like(place)

    def count(self, place: Tensor, *, beyond: Tensor | int = 0) -> Tensor:
        """How many keys (or summaries) are read at the most, of those at a distance of `beyond` or more.

        `beyond` is a number, or one for each query: [..., T], or [..., H, T] where heads differ.
        """
        return less(place + 1, beyond)

    def farthest(self) -> int | None:
        """How many keys back, the query's own included, any query ever reads; None if that has no bound."""
        return None

    def reads_everything(self, place: Tensor) -> Tensor:
        """bool: whether every key up to the query's own is read with its full weight."""
        near, first = self.near(place), self.first(place)
        dimensions = max(near.ndim, first.ndim)
        return by_head(near, dimensions) + by_head(first, dimensions) > by_head(place, dimensions)

    def of_keys(self) -> Branch:
        """The same without what it reads of keys that are gone."""
        return self

    def rating_flops(self, place: Tensor, head_width: int) -> Tensor:
        """Operations of one head that only decide which keys are read: ranking, summaries."""
        return torch.zeros_like(place)


@dataclass(frozen=True)
class FixedBranch(Branch):
    """A branch whose set follows from positions alone. `allows` is all it needs; the answers can be made cheaper."""

    @property
    def follows_positions(self) -> bool:
        return True

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        """bool: whether the query at place `query` reads the key at place `key` (0 <= key <= query).

        Both broadcast with [B, H, T, S]; the answer may have a dimension of heads where they differ.
        """
        raise NotImplementedError

    def reads_everything(self, place: Tensor) -> Tensor:
        return self.count(place) > place

    def count(self, place: Tensor, *, beyond: Tensor | int = 0) -> Tensor:
        """The count by looking at every pair, some queries at a time."""
        longest = int(place.max()) + 1 if place.numel() else 0
        key = torch.arange(max(longest, 0), device=place.device)
        queries = place.reshape(-1, 1)
        bound = torch.as_tensor(beyond, device=place.device)
        if bound.ndim > place.ndim:
            bound = bound.movedim(-2, 0).reshape(bound.shape[-2], -1, 1)  # [H, ... T, 1]
        else:
            bound = bound.expand_as(place).reshape(-1, 1)
        step = max(1, PAIRS_AT_ONCE // max(longest, 1))
        parts = []
        for begin in range(0, len(queries), step):
            query, least = queries[begin : begin + step], bound[..., begin : begin + step, :]
            # [T', S], or [H, T', S] where heads differ
            read = self.allows(query, key) & (key <= query) & (query - key >= least)
            parts.append(read.sum(dim=-1))
        if not parts:
            return torch.zeros_like(place)
        found = torch.cat(parts, dim=-1)
        return found.reshape(place.shape) if found.ndim == 1 else found.reshape(-1, *place.shape).movedim(0, -2)


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

    @property
    def follows_positions(self) -> bool:
        return all(branch.follows_positions for branch in self.branches)

    @property
    def ranks(self) -> bool:
        return any(branch.ranks for branch in self.branches)

    def near(self, place: Tensor) -> Tensor:
        return largest((branch.near(place) for branch in self.branches), place)

    def first(self, place: Tensor) -> Tensor:
        return largest((branch.first(place) for branch in self.branches), place)

    def count(self, place: Tensor, *, beyond: Tensor | int = 0) -> Tensor:
        """The keys that one member reads without a gap, and what each member reads farther away."""
        near = self.near(place)
        if near.ndim > place.ndim:
            place = place.expand(*near.shape[:-2], -1)
        edge = torch.maximum(*both_by_head(near, torch.as_tensor(beyond, device=near.device)))
        total = less(near, beyond)
        for branch in self.branches:
            total = torch.add(*both_by_head(total, branch.count(place, beyond=edge)))
        return torch.minimum(*both_by_head(total, less(place + 1, beyond)))

    def farthest(self) -> int | None:
        bounds = [branch.farthest() for branch in self.branches]
        return None if None in bounds else max(bound for bound in bounds if bound is not None)

    def reads_everything(self, place: Tensor) -> Tensor:
        answers = [branch.reads_everything(place) for branch in self.branches]
        answers.append(super().reads_everything(place))
        return largest(answers, place).bool()

    def rating_flops(self, place: Tensor, head_width: int) -> Tensor:
        parts = [branch.rating_flops(place, head_width) for branch in self.branches]
        return torch.stack(parts).sum(dim=0)


def members(branch: Branch) -> tuple[Branch, ...]:
    """The branches of a union, or the branch itself."""
    return branch.branches if isinstance(branch, Union) else (branch,)


def by_head(answer: Tensor, dimensions: int) -> Tensor:
    """An answer [..., T] with a dimension of heads [..., 1, T], if `dimensions` ask for one more than it has."""
    return answer.unsqueeze(-2) if answer.ndim < dimensions else answer


def both_by_head(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Two answers, both with a dimension of heads if one of them has it; a single number stays as it is."""
    dimensions = max(one.ndim, other.ndim)
    return by_head(one, dimensions), other if other.ndim == 0 else by_head(other, dimensions)


def less(count: Tensor, beyond: Tensor | int) -> Tensor:
    """A count of the nearest keys without those nearer than `beyond`."""
    if isinstance(beyond, Tensor):
        count, beyond = both_by_head(count, beyond)
    return (count - beyond).clamp(min=0)


def largest(answers: Iterable[Tensor], place: Tensor) -> Tensor:
    """The largest of several answers about queries at `place`, some of which may differ by head."""
    found = list(answers)
    dimensions = max(answer.ndim for answer in found)
    total = by_head(found[0], dimensions)
    for answer in found[1:]:
        total = torch.maximum(total.to(torch.int64), by_head(answer, dimensions).to(torch.int64))
    return total


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
