"""The equation of one call: what a mechanism returns, and what can be asked of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from varifocal.equations.branches import Branch, Union, members
from varifocal.equations.branches.base import by_head
from varifocal.equations.normalizers import Normalizer
from varifocal.equations.scores import Dot, Score


@dataclass(frozen=True, eq=False)
class Equation:
    """o_i = sum_m w_im sum_{j in S_im} softmax_{S_im}(s_ij) v_j: branches S_m, weights w and score s of a call."""

    branches: tuple[Branch, ...]
    """M of them."""
    weights: Tensor | None = None
    """[B, H, T, M]; None for one branch of weight 1."""
    score: Score = None  # type: ignore[assignment]
    """Dot() if none is given."""
    normalizer: Normalizer | None = None
    """None for softmax."""
    relative_values: Tensor | None = None
    """[N, D]: row min(x, N - 1) is added to the value of a key at distance x; None for none."""
    losses: Mapping[str, Tensor] = field(default_factory=dict)
    """Auxiliary losses of whatever made the weights (a gate's z-loss), with their coefficients."""

    def __post_init__(self) -> None:
        # Made here and by no factory, which torch.compile cannot trace.
        if self.score is None:
            object.__setattr__(self, "score", Dot())

    def of_keys(self) -> Equation:
        """The same for the values of keys alone: without what is added by distance, or kept of keys that are gone."""
        return replace(self, branches=tuple(branch.of_keys() for branch in self.branches), relative_values=None)

    def passes(self) -> tuple[Branch, ...]:
        """What a kernel reads one after the other: branches that follow positions share one pass over their keys."""
        shared = [member for branch in self.branches if branch.follows_positions for member in members(branch)]
        others = [branch for branch in self.branches if not branch.follows_positions]
        return (*((Union(tuple(shared)),) if shared else ()), *others)

    def keys_read(self, place: Tensor) -> float:
        """Keys (or summaries) of one head whose values are mixed, for an average query at places [T]."""
        keys = sum(float(one.count(place).double().mean()) for one in self.passes())
        return keys if self.normalizer is None else self.normalizer.keys_read(keys, self.score.features)

    def farthest(self) -> int | None:
        """How many keys back, the query's own included, any query ever reads; None if that has no bound."""
        return Union(self.branches).farthest()

    def all_read_everything(self, place: Tensor) -> Tensor:
        """bool [..., T] or [..., H, T]: where all branches read every key, so that their weights have no effect."""
        answers = [branch.reads_everything(place) for branch in self.branches]
        dimensions = max(answer.ndim for answer in answers)
        same = by_head(answers[0], dimensions)
        for answer in answers[1:]:
            same = same & by_head(answer, dimensions)
        return same

    def foreign_share(self, place: Tensor) -> float | None:
        """How much of what is read is not dense attention, at the most, for queries at places [T] of a call.

        0 promises dense attention to rounding. A number g above 0 promises (1 - g) dense + g another convex mean of
        values, so that no head's output moves by more than 2 g max |v|. None promises nothing.
        """
        if not self.score.is_neutral() or self.normalizer is not None:
            return None
        if self.relative_values is not None and bool((self.relative_values != 0).any()):
            return None
        dense = [branch.reads_everything(place) for branch in self.branches]
        dimensions = max(answer.ndim for answer in dense)
        dense = [by_head(answer, dimensions) for answer in dense]
        whole = torch.stack(torch.broadcast_tensors(*dense), dim=-1)  # type: ignore[no-untyped-call]  # [..., T, M]
        # Some query has no branch that reads everything: nothing of its output is promised to be dense.
        if not bool(whole.any(dim=-1).all()):
            return None
        if self.weights is None:
            return 0.0
        while whole.ndim < self.weights.ndim:
            whole = whole.unsqueeze(0)
        return float((self.weights.detach() * ~whole).sum(dim=-1).max())
