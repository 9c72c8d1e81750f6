"""Earlier segments in a matrix of associations: Munkhdalai et al., Infini-attention, arXiv:2404.07143."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from varifocal.equations.branches.base import Branch, less, require_at_least


@dataclass(frozen=True, eq=False)
class Associations:
    """What is left of keys that are gone: M = sum phi(k) v^T and z = sum phi(k) of the segments of one document."""

    matrix: Tensor
    """[B, G, F, D]: M."""
    norm: Tensor
    """[B, G, F]: z."""
    start: Tensor
    """int64 [B]: where the document begins, as in a Layout; what is before the kept keys is negative."""
    folded: Tensor
    """int64 [B]: how many tokens of the document are in M and z: whole segments; 0 for none."""


@dataclass(frozen=True, eq=False)
class Compressed(Branch):
    """The segments of the document before the query's own, each key j with the weight phi(q) . phi(k_j).

    o = phi(q) M / phi(q) z with M = sum phi(k_j) u_j^T and z = sum phi(k_j). The features are positive, so it is the
    softmax of log phi(q) . phi(k_j). u_j is v_j; with the delta rule it is what the memory does not know yet,
    v_j - phi(k_j) M' / phi(k_j) z' for the memory of the segments before that of key j.
    """

    length: int
    """Keys in a segment."""
    queries: Tensor
    """[B, H, T, F]: phi(q), positive."""
    keys: Tensor
    """[B, G, S, F]: phi(k), positive."""
    delta: bool = False
    """Whether the memory learns by the delta rule."""
    past: Associations | None = None
    """The segments whose keys are gone; None if none are."""

    def __post_init__(self) -> None:
        require_at_least("segment length", self.length, 1)

    def earlier(self, place: Tensor) -> Tensor:
        """How many keys lie in segments before that of a query."""
        return torch.div(place.clamp(min=0), self.length, rounding_mode="floor") * self.length

    def count(self, place: Tensor, *, beyond: Tensor | int = 0) -> Tensor:
        """A row of M for each feature, whatever the number of keys in it."""
        return less(torch.where(self.earlier(place) > 0, self.queries.shape[-1], 0), beyond)

    def reads_everything(self, place: Tensor) -> Tensor:
        """bool: where there is no memory yet, nothing is to be decided between it and what is read beside it."""
        return self.earlier(place) == 0

    def rating_flops(self, place: Tensor, head_width: int) -> Tensor:
        """Every key is added to M, and with the delta rule M is read for it."""
        return torch.full_like(place, (4 if self.delta else 2) * head_width * self.queries.shape[-1])

    def of_keys(self) -> Compressed:
        if self.past is None:
            return self
        return replace(self, past=replace(self.past, matrix=torch.zeros_like(self.past.matrix)))


def with_ones(values: Tensor) -> Tensor:
    """Values [..., D] with a column of ones, whose sums are z."""
    return torch.cat((values, torch.ones_like(values[..., :1])), dim=-1)


def learned(state: Tensor | None, keys: Tensor, values: Tensor, *, delta: bool) -> Tensor:
    """[M, z] of [M, z] [B, G, F, D + 1] (None: nothing yet) and the features [B, G, t, F] of one more segment's keys.

    `values` [B, G, t, D + 1] are theirs, with a column of ones.
    """
    if state is None:
        return keys.mT @ values
    if delta:
        known = keys @ state
        total = known[..., -1:]
        known = known[..., :-1] / total.masked_fill(total == 0, 1.0)
        values = torch.cat((values[..., :-1] - known, values[..., -1:]), dim=-1)
    return state + keys.mT @ values
