"""Softmaxes over sets without common keys, mixed into one output in a single pass over their means.

Several of them together are one softmax over all of their keys; how much each counts in it follows from their
logsumexps. All that is done with these numbers, one for each query and head, comes before the means are touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Part(NamedTuple):
    """What a softmax over some keys gives."""

    mean: Tensor
    """[B, H, T, D]."""
    logsumexp: Tensor
    """[B, H, T]; minus infinity where nothing was read, and then the mean is 0."""


class Joined(NamedTuple):
    """One softmax over the keys of several parts."""

    shares: list[Tensor | None]
    """[B, H, T] for each part: how much of the softmax lies on its keys; None for 1."""
    logsumexp: Tensor
    """[B, H, T]."""


def join(logsumexps: Sequence[Tensor]) -> Joined:
    """The shares of parts without common keys; where none read anything, shares of 0 with gradient 0."""
    if len(logsumexps) == 1:
        return Joined([None], logsumexps[0])
    stacked = torch.stack(tuple(logsumexps), dim=-1)  # [B, H, T, P]
    # The shift cancels in the result, so no gradient needs to follow it.
    highest = stacked.detach().amax(dim=-1, keepdim=True)
    # Minus infinity minus itself would be NaN where no part read anything.
    highest = torch.where(highest == float("-inf"), 0.0, highest)
    shares = (stacked - highest).exp()
    total = shares.sum(dim=-1, keepdim=True)
    nothing = total == 0
    total = total.masked_fill(nothing, 1.0)
    logsumexp = (total.log() + highest).masked_fill(nothing, float("-inf"))
    return Joined(list((shares / total).unbind(dim=-1)), logsumexp.squeeze(-1))


def mix(means: tuple[Tensor, ...], factors: tuple[Tensor | None, ...], dtype: torch.dtype) -> Tensor:
    """The sum of means [B, H, T, D], each times its factor [B, H, T] (None for 1), in the given type.

    Sums run in the type of the factors, which is never narrower than float32.
    """
    total: Tensor | None = None
    for mean, factor in zip(means, factors, strict=True):
        part = mean if factor is None else mean * factor[..., None]
        total = part if total is None else total + part
    assert total is not None
    return total.to(dtype)
