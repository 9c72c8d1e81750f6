"""Branches that lie inside each other share their work: each reads the ring that the one inside it leaves.

For a window inside causal attention the two rings are the near and the far keys. Both together cost what one attention
costs, and causal attention is their sum, joined by their logsumexps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from varifocal.equations.branches import Branch, Causal, FixedBranch, RandomBlocks, Window, members
from varifocal.kernels.flex.key_sets import Pattern, differs_by_head


def fixed_members(branch: Branch) -> tuple[FixedBranch, ...] | None:
    """The members of a branch that a kernel can tell from positions alone, whatever the head; None if not all."""
    found = tuple(
        member
        for member in members(branch)
        if isinstance(member, FixedBranch) and not isinstance(member, RandomBlocks) and not differs_by_head(member)
    )
    return found if len(found) == len(members(branch)) else None


def chain(branches: Sequence[Branch]) -> list[int] | None:
    """The numbers of two or more branches of which each holds the one before it; None if they do not lie so."""
    fixed = {number: found for number, branch in enumerate(branches) if (found := fixed_members(branch)) is not None}
    if len(fixed) < 2:
        return None
    # A set that holds another holds everything that the other does, and so more of its fellows.
    order = sorted(fixed, key=lambda number: sum(holds(fixed[number], other) for other in fixed.values()))
    nested = all(holds(fixed[outer], fixed[inner]) for inner, outer in itertools.pairwise(order))
    return order if nested else None


def holds(outer: tuple[FixedBranch, ...], inner: tuple[FixedBranch, ...]) -> bool:
    """Whether it is known that every key of `inner` is one of `outer`."""
    if any(isinstance(member, Causal) for member in outer):
        return True
    # Windows are compared by size; of other branches it is only known that each holds itself.
    widest = max((widest_window(member) or 0 for member in outer), default=0)
    return all(
        size <= widest if (size := widest_window(member)) is not None else any(member is other for other in outer)
        for member in inner
    )


def widest_window(member: FixedBranch) -> int | None:
    """The size of a window that is the same for all heads; None for anything else."""
    return member.size if isinstance(member, Window) and isinstance(member.size, int) else None


def rings(branches: Sequence[tuple[FixedBranch, ...]]) -> list[Pattern]:
    """What each branch of a chain reads beyond the one before it."""
    inner: list[tuple[FixedBranch, ...]] = [(), *branches]
    return [Pattern(outer, outside) for outer, outside in zip(branches, inner, strict=False)]
