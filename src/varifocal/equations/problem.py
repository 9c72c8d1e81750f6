"""One call of attend, checked and complete, as every backend receives it; and what a backend answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from varifocal.equations.branches import Branch
from varifocal.equations.layout import Layout
from varifocal.equations.scores import Score


@dataclass(frozen=True, eq=False)
class Problem:
    """o_i = sum_m w_im sum_{j in S_im} softmax_{S_im}(s_ij) v_j, for the queries and keys of a layout."""

    q: Tensor
    """[B, H, T, D]."""
    k: Tensor
    """[B, G, S, D], H a multiple of G: query head h reads key head h // (H / G)."""
    v: Tensor
    """[B, G, S, D]."""
    branches: tuple[Branch, ...]
    """M of them."""
    weights: Tensor | None
    """[B, H, T, M]; None for one branch of weight 1."""
    score: Score
    layout: Layout


class Attended(NamedTuple):
    """What attend returns."""

    output: Tensor
    """[B, H, T, D], in the dtype of q."""
    logsumexp: Tensor
    """[B, H, T, M]: log of the sum of exp(score) over each branch's keys, minus infinity for none; detached."""
    selected: tuple[Tensor | None, ...]
    """For each branch with a top-k: int32 [B, H, T, K], the index of each chosen key (of each chosen block's first
    key, for select="blocks"; the query's own block is not listed), ascending, then -1 where fewer were chosen."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Softmax, gates and sums run in float32, or in float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32
