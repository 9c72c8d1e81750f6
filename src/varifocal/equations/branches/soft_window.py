"""A window whose width is learned: Sukhbaatar et al., Adaptive Attention Span, arXiv:1905.07799."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from varifocal.equations.branches.base import Branch, less, require_at_least, require_finite


@dataclass(frozen=True, eq=False)
class SoftWindow(Branch):
    """A window of its own width for every query and head, with a soft edge through which the width learns.

    A key at distance x has the weight clamp((width - x) / edge, 0, 1): 1 up to width - edge, 0 from width on.
    """

    width: Tensor
    """[B, H, T]: the width of each query's window in each head, at least `edge`, at most `limit`."""
    edge: float = 32.0
    """Keys over which the weight falls from 1 to 0."""
    limit: int = 512
    """No key at this distance or farther is read, whatever the width says."""

    def __post_init__(self) -> None:
        require_finite("soft edge", self.edge, least=1)
        require_at_least("window limit", self.limit, 1)

    @property
    def follows_positions(self) -> bool:
        return True

    def near(self, place: Tensor) -> Tensor:
        full = (self.width.detach() - self.edge).floor().long() + 1
        return torch.minimum(place.unsqueeze(-2) + 1, full.clamp(max=self.limit)).clamp(min=0)

    def count(self, place: Tensor, *, beyond: Tensor | int = 0) -> Tensor:
        widest = self.width.detach().ceil().long().clamp(max=self.limit)
        return less(torch.minimum(place.unsqueeze(-2) + 1, widest), beyond)

    def farthest(self) -> int:
        return self.limit

    def log_weight(self, distance: Tensor, width: Tensor) -> Tensor:
        """The logarithm of the weight of a key at `distance`; minus infinity where it is not read.

        Only keys strictly inside the edge (0 < weight < 1) pass a gradient to the width.
        """
        weight = self.weight(distance, width)
        inside = (weight > 0) & (weight < 1)
        # The logarithm is taken of safe numbers only: log 0 would make NaN gradients of masked keys.
        logarithm = torch.where(inside, weight, 1.0).log()
        return logarithm.masked_fill(~self.reads(distance, width), float("-inf"))

    def reads(self, distance: Tensor, width: Tensor) -> Tensor:
        """bool: whether a key at `distance` has any weight."""
        return (self.weight(distance, width) > 0) & (distance < self.limit)

    def weight(self, distance: Tensor, width: Tensor) -> Tensor:
        """The weight of a key at `distance`, not yet clamped to 0..1."""
        return (width - distance) / self.edge
