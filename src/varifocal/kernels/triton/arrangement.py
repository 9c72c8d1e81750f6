"""Branches as the kernels take them, and the order in which they are read: from the inside out."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from varifocal.equations.branches import Branch, Causal, Prefix, SoftWindow, Window, members
from varifocal.equations.branches.head_sizes import HeadSizes, each_head

EVERY_KEY = 1 << 30
"""The size that holds every key: the kernels add it to places in int32."""
MOST_BRANCHES = 4
EVERY, WINDOW, PREFIX, SOFT, CONTINUES = 1, 2, 4, 8, 16
SLOT, BITS = 5, 7
"""As in rings.py, which cannot be imported without triton; a test compares them."""


@dataclass(frozen=True)
class Sizes:
    """The keys of one branch; each tuple has a number for every head."""

    window: tuple[int, ...]
    prefix: tuple[int, ...]
    limit: int = 0
    edge: float = 0.0
    """0 without a soft window."""

    @property
    def every(self) -> bool:
        """Whether it reads every key in every head."""
        return min(self.window) >= EVERY_KEY

    @property
    def soft(self) -> bool:
        """Whether a soft window makes a difference."""
        return self.edge > 0 and not self.every

    def inside(self, other: Sizes) -> bool:
        """Whether no key can have more weight here than in the other branch."""
        if other.every:
            return True
        if self.every or (self.soft and other.soft) or (self.soft and self.limit > min(other.window)):
            return False
        pairs = zip((*self.window, *self.prefix), (*other.window, *other.prefix), strict=True)
        return all(mine <= theirs for mine, theirs in pairs)

    @property
    def flags(self) -> int:
        """The bits of its kind."""
        if self.every:
            return EVERY
        found = WINDOW * (max(self.window) > 0) | PREFIX * (max(self.prefix) > 0) | SOFT * self.soft
        # A branch of nothing at all is a prefix of no keys.
        return found or PREFIX


@dataclass(frozen=True)
class Arrangement:
    """Branches in the order in which they are read."""

    kinds: int
    """The bits of every ring."""
    order: tuple[int, ...]
    sizes: tuple[int, ...]
    """Window, prefix and limit of each ring in each head."""
    edges: tuple[float, ...]
    soft: int
    """How many branches have widths that count."""
    longest_prefix: int
    reads_far: bool
    """Whether a branch reads every key."""


@functools.lru_cache(maxsize=256)
def arrange(branches: tuple[Sizes, ...]) -> Arrangement:
    """The order with the most branches that lie inside the next one."""

    def continues(order: tuple[int, ...]) -> list[bool]:
        return [False, *(branches[one].inside(branches[other]) for one, other in itertools.pairwise(order))]

    order = max(itertools.permutations(range(len(branches))), key=lambda order: sum(continues(order)))
    kinds = 0
    sizes: list[int] = []
    for ring, (number, continued) in enumerate(zip(order, continues(order), strict=True)):
        branch = branches[number]
        kinds |= (branch.flags | CONTINUES * continued | number << SLOT) << (BITS * ring)
        for window, prefix in zip(branch.window, branch.prefix, strict=True):
            sizes += (window, prefix, branch.limit)
    prefixes = [max(branch.prefix) for branch in branches if not branch.every]
    return Arrangement(
        kinds=kinds,
        order=order,
        sizes=tuple(sizes),
        edges=tuple(branches[number].edge for number in order),
        soft=sum(branch.soft for branch in branches),
        longest_prefix=max(prefixes, default=0),
        reads_far=any(max(branch.window) >= EVERY_KEY for branch in branches),
    )


@functools.lru_cache(maxsize=256)
def tables(arrangement: Arrangement, device: torch.device) -> tuple[Tensor, Tensor]:
    """Sizes int32 and edges float32 on a device; made once, since each layer and step asks for them."""
    sizes = torch.tensor(arrangement.sizes, dtype=torch.int32, device=device)
    return sizes, torch.tensor(arrangement.edges, dtype=torch.float32, device=device)


def as_sizes(branch: Branch, heads: int) -> tuple[Sizes, SoftWindow | None] | None:
    """What the kernels need of a branch, and its soft window; None if it has a member of another kind."""
    window, prefix = [0] * heads, [0] * heads
    soft: SoftWindow | None = None
    for member in members(branch):
        if isinstance(member, Causal):
            window = [EVERY_KEY] * heads
        elif isinstance(member, Window):
            window = larger(window, member.size)
        elif isinstance(member, Prefix):
            prefix = larger(prefix, member.size)
        elif isinstance(member, SoftWindow) and soft is None:
            soft = member
        else:
            return None
    if soft is None:
        return Sizes(tuple(window), tuple(prefix)), None
    return Sizes(tuple(window), tuple(prefix), min(soft.limit, EVERY_KEY), float(soft.edge)), soft


def larger(sizes: list[int], given: HeadSizes) -> list[int]:
    """The larger of two sizes, head by head."""
    others = each_head(given) if isinstance(given, tuple) else [given] * len(sizes)
    return [max(size, min(other, EVERY_KEY)) for size, other in zip(sizes, others, strict=True)]
