"""Softmaxes over sets without common keys, joined into one over all of them, by their logsumexps."""

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


def join(parts: Sequence[Part]) -> Part:
    """One softmax over the keys of all parts; where none read anything, 0 and minus infinity with gradient 0."""
    if len(parts) == 1:
        return parts[0]
    logsumexps = torch.stack([part.logsumexp for part in parts], dim=-1)  # [B, H, T, P]
    # The shift cancels in the result, so no gradient needs to follow it.
    highest = logsumexps.detach().amax(dim=-1, keepdim=True)
    # Minus infinity minus itself would be NaN where no part read anything.
    highest = torch.where(highest == float("-inf"), 0.0, highest)
    shares = (logsumexps - highest).exp()
    total = shares.sum(dim=-1, keepdim=True)
    nothing = total == 0
    total = total.masked_fill(nothing, 1.0)
    shares = shares / total
    mean = parts[0].mean * shares[..., 0, None]
    for number, part in enumerate(parts[1:], start=1):
        mean = mean + part.mean * shares[..., number, None]
    logsumexp = (total.log() + highest).masked_fill(nothing, float("-inf"))
    return Part(mean, logsumexp.squeeze(-1))
