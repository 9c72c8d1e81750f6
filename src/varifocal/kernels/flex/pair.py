"""A pair of a query and a key, as FlexAttention's functions see it: numbers without shape, or shapes that broadcast."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Pair(NamedTuple):
    """Indices of one pair, and where its query stands."""

    batch: Tensor
    head: Tensor
    query: Tensor
    """Index among the T queries."""
    key: Tensor
    """Index among the S keys."""
    position: Tensor
    """The index of the query's own key."""
    start: Tensor
    """The index of the first key of the query's document; after `position` for padding."""

    @property
    def query_place(self) -> Tensor:
        """The query's place in its document."""
        return self.position - self.start

    @property
    def key_place(self) -> Tensor:
        """The key's place, counted from the start of the query's document."""
        return self.key - self.start

    @property
    def visible(self) -> Tensor:
        """bool: whether the key lies in the query's document and not in its future."""
        return (self.key >= self.start) & (self.key <= self.position)
