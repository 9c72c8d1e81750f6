"""Tokens with padding among them, put in an order in which a text is one run: padding first."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Arrangement:
    """Where tokens stand while the layers run, and in their memories, if that is not where they were given."""

    place: Tensor
    """int64 [B, S]: where the token that was given at each place stands."""
    past: int
    """How many of the S tokens stood in memories before this call; the others are its T tokens."""
    moves: bool
    """Whether the call's own tokens stand elsewhere than they were given, or only those before them."""
    padding: Tensor | None = None
    """bool [B, N]: which of the first N tokens are padding that this call puts first; the others are not moved."""
    texts: Tensor | None = None
    """int64 [B, T']: the call's tokens that are text, where its padding goes past the layers, into memories alone."""

    @property
    def given(self) -> Tensor:
        """int64 [B, S]: where the token that stands at each place was given."""
        return self.place.argsort(dim=1)

    def arrange(self, x: Tensor) -> Tensor:
        """x [B, T, *] of the call's tokens as the layers take them."""
        if self.texts is not None:
            return taken(x, self.texts, dim=1)
        return taken(x, self.given, dim=1) if self.moves else x

    def restore(self, x: Tensor, *, dim: int) -> Tensor:
        """x [B, ..., T, *] with the call's tokens in dimension `dim`, as they were given; 0 for what was left out."""
        if self.texts is None:
            return taken(x, self.place, dim=dim) if self.moves else x
        shape = list(x.shape)
        shape[dim] = self.place.shape[1] - self.past
        return x.new_zeros(shape).scatter(dim, widened(self.texts, x, dim=dim), x)

    def restore_keys(self, x: Tensor) -> Tensor:
        """x [B, ..., S] with a column for every token so far, as they were given."""
        return taken(x, self.place, dim=x.ndim - 1)

    def restore_indices(self, indices: Tensor) -> Tensor:
        """Indices [B, *] of tokens that stand somewhere as those of the same tokens where they were given."""
        flat = indices.flatten(1)
        found = self.given.gather(1, flat.clamp(min=0).to(torch.int64)).to(indices.dtype)
        # A negative index names no token.
        return torch.where(flat < 0, flat, found).view_as(indices)


def padding_first(mask: Tensor) -> Tensor:
    """int64 [B, S]: where each token stands when the padding (0 in the mask [B, S]) is put before the text."""
    return mask.sort(dim=1, stable=True).indices.argsort(dim=1)


def taken(x: Tensor, index: Tensor, *, dim: int) -> Tensor:
    """x [B, ...] with the entries `index` [B, N] of dimension `dim`, row by row."""
    return x.gather(dim, widened(index, x, dim=dim))


def widened(index: Tensor, x: Tensor, *, dim: int) -> Tensor:
    """Indices [B, N] into dimension `dim` of x [B, ...], for all of its other dimensions."""
    narrow, wide = [len(index)] + [1] * (x.ndim - 1), list(x.shape)
    narrow[dim] = wide[dim] = index.shape[1]
    return index.view(narrow).expand(wide)
