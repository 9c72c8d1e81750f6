"""Which keys a query reads: the sets of the equation, pair by pair, as FlexAttention asks for them.

Every set answers for one pair at a time from the branch's own predicate, so it serves as a mask_mod inside a kernel, as
the rule by which whole tiles are left out, and, with indices that broadcast, for all pairs at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from varifocal.equations.branches import Branch, FixedBranch, Prefix, RandomBlocks, SoftWindow, Window
from varifocal.equations.branches.head_sizes import each_head
from varifocal.equations.branches.own_block import OwnBlock
from varifocal.kernels.flex.pair import Pair

OUTSIDE = "outside of the kernel"
"""Marks a field that no function of a pair looks at."""


@dataclass(frozen=True, eq=False)
class KeySet:
    """Some of the keys that a query could see."""

    def allows(self, pair: Pair) -> Tensor:
        """bool: whether the pair is read."""
        return pair.visible & self.holds(pair)

    def holds(self, pair: Pair) -> Tensor:
        """bool: whether a visible pair is in the set."""
        raise NotImplementedError

    def log_weight(self, pair: Pair) -> Tensor | None:
        """What is added to the score of a pair in the set; None for 0. Anything finite for other pairs."""
        return None


@dataclass(frozen=True, eq=False)
class Pattern(KeySet):
    """Pairs that one of the branches `inside` allows, and none of those `outside`."""

    inside: tuple[FixedBranch, ...]
    outside: tuple[FixedBranch, ...] = ()

    def holds(self, pair: Pair) -> Tensor:
        held = any_allows(self.inside, pair)
        return held & ~any_allows(self.outside, pair) if self.outside else held


def any_allows(branches: tuple[FixedBranch, ...], pair: Pair) -> Tensor:
    """bool: whether one of the branches allows the pair."""
    allowed = branches[0].allows(pair.query_place, pair.key_place)
    for branch in branches[1:]:
        allowed = allowed | branch.allows(pair.query_place, pair.key_place)
    return allowed


@dataclass(frozen=True, eq=False)
class ByHead(KeySet):
    """The last keys and the first ones, as many as each head has for itself."""

    windows: Tensor
    """int32 [H]; 0 for none."""
    prefixes: Tensor
    """int32 [H]; 0 for none."""
    sizes: tuple[tuple[int, int], ...] = field(metadata={OUTSIDE: True})
    """The same as numbers, a window and a prefix for each head."""

    def holds(self, pair: Pair) -> Tensor:
        near = pair.position - pair.key < self.windows[pair.head]
        return near | (pair.key_place < self.prefixes[pair.head])


def by_head(branches: Sequence[FixedBranch], heads: int, device: torch.device) -> ByHead:
    """The union of windows and prefixes whose sizes differ by head."""
    windows, prefixes = [0] * heads, [0] * heads
    for branch in branches:
        assert isinstance(branch, Window | Prefix)
        assert isinstance(branch.size, tuple)
        sizes = windows if isinstance(branch, Window) else prefixes
        sizes[:] = map(max, sizes, each_head(branch.size))
    near, first = (torch.tensor(one, dtype=torch.int32, device=device) for one in (windows, prefixes))
    return ByHead(near, first, tuple(zip(windows, prefixes, strict=True)))


def differs_by_head(branch: Branch) -> bool:
    """Whether heads have sizes of their own."""
    return isinstance(branch, Window | Prefix) and isinstance(branch.size, tuple)


@dataclass(frozen=True, eq=False)
class Drawn(KeySet):
    """Random blocks, drawn once for each query: a hash of 64 bits for each pair is nothing for a kernel."""

    branch: RandomBlocks
    draws: tuple[Tensor, ...]
    """int32 [B, T] each: the number of a block."""

    def holds(self, pair: Pair) -> Tensor:
        drawn = tuple(draw[pair.batch, pair.query] for draw in self.draws)
        return self.branch.allows_drawn(pair.query_place, pair.key_place, drawn)


@dataclass(frozen=True, eq=False)
class Soft(KeySet):
    """A soft window; the width learns through the score, never through the mask."""

    branch: SoftWindow
    width: Tensor
    """[B, H, T], in the type of the scores."""
    fixed_width: Tensor
    """The same, detached: FlexAttention takes one look at a tensor that learns, and the score has it."""

    def holds(self, pair: Pair) -> Tensor:
        width = self.fixed_width[pair.batch, pair.head, pair.query]
        return self.branch.reads(pair.position - pair.key, width)

    def log_weight(self, pair: Pair) -> Tensor:
        width = self.width[pair.batch, pair.head, pair.query]
        weight = self.branch.log_weight(pair.position - pair.key, width)
        # Minus infinity would reach the gradient of pairs that the mask leaves out.
        return torch.where(weight == float("-inf"), 0.0, weight)


@dataclass(frozen=True, eq=False)
class Selected(KeySet):
    """The keys, or the blocks of keys, that a top-k selected for each query and head."""

    keys: Tensor
    """int32 [B, H, T, P]: indices of keys (of first keys of blocks), ascending, then NONE; P a power of two."""
    own: OwnBlock | None
    """The query's own block, if blocks were selected; None if keys were."""

    def holds(self, pair: Pair) -> Tensor:
        if self.own is None:
            return self.lists(pair, pair.key)
        place = pair.key_place
        first = pair.start + torch.div(place, self.own.length, rounding_mode="floor") * self.own.length
        return self.lists(pair, first) | self.own.allows(pair.query_place, place)

    def lists(self, pair: Pair, wanted: Tensor) -> Tensor:
        """bool: whether `wanted` was selected, by bisection: exact, and the same forward and backward."""
        at = torch.zeros_like(wanted)
        # The list's width is a power of two, so a fixed number of halvings ends at one entry, without branches.
        step = self.keys.shape[3] // 2
        while step:
            lower = self.keys[pair.batch, pair.head, pair.query, at + (step - 1)] < wanted
            at = torch.where(lower, at + step, at)
            step //= 2
        return self.keys[pair.batch, pair.head, pair.query, at] == wanted


@dataclass(frozen=True, eq=False)
class EarlierSummaries(KeySet):
    """The summaries of segments that were complete before the query's own began; keys are numbers of summaries."""

    first: Tensor
    """int32 [B, N]: the index of each segment's first key; S or more where there is none."""
    own: OwnBlock

    def allows(self, pair: Pair) -> Tensor:
        first = self.first[pair.batch, pair.key]
        length = self.own.length
        begin = pair.start + torch.div(pair.query_place, length, rounding_mode="floor") * length
        return (first >= pair.start) & (first < begin)
