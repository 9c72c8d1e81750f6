"""What backends are asked to evaluate, checked and complete; and what they answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from varifocal.equations.branches import Branch, Indexer, TopK
from varifocal.equations.layout import Layout
from varifocal.equations.normalizers import Normalizer
from varifocal.equations.scores import Score


@dataclass(frozen=True, eq=False)
class Shortcuts:
    """What a memory keeps of past tokens. It saves work and changes no result: a backend may do without."""

    block_means: Tensor | None = None
    """float32 [B, G, N, D], N at least ceil(S / block): the mean of each block of what a TopK by blocks ranks."""
    segment_summaries: Tensor | None = None
    """[B, H, N, 2 D]: summary key and value of the complete segments of a text that is one document."""


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
    normalizer: Normalizer | None = None
    """None for softmax."""
    relative_values: Tensor | None = None
    """[N, D]: row min(x, N - 1) is added to the value of a key at distance x."""
    shortcuts: Shortcuts | None = None
    wants_logsumexp: bool = True
    """Whether anybody looks at it; if not, a branch whose weights are 0 need not be read at all."""


class Asked(NamedTuple):
    """A call whose queries are the last tokens of rows that are one document each."""

    q: Tensor
    k: Tensor
    v: Tensor
    branches: Sequence[Branch]
    weights: Tensor | None
    score: Score
    shortcuts: Shortcuts | None
    wants_logsumexp: bool


class Attended(NamedTuple):
    """What attend returns."""

    output: Tensor
    """[B, H, T, D], in the dtype of q."""
    logsumexp: Tensor
    """[B, H, T, M]: log of the sum of exp(score) over each branch's keys, minus infinity for none; detached.
    Of no use where the problem did not want it."""
    selected: tuple[Tensor | None, ...]
    """For each branch with a top-k: int32 [B, H, T, K], the index of each selected key (of each selected block's first
    key, for select="blocks"; the query's own block is not listed), ascending, then -1 where fewer were selected."""


@dataclass(frozen=True, eq=False)
class DivergenceProblem:
    """The mean over queries and heads of KL(attention || indexer), both as softmax over the keys that are read."""

    q: Tensor
    """[B, H, T, D] in the accumulation type, detached: the attention is the target."""
    k: Tensor
    """[B, G, S, D] in the accumulation type, detached."""
    indexer: Indexer
    selected: Tensor
    """int32 [B, H, T, K], as in Attended."""
    top_k: TopK
    """The branch that selected them."""
    layout: Layout


@dataclass(frozen=True, eq=False)
class PoolingProblem:
    """Adds new keys, in the order of the text, to the means of their blocks, in place."""

    means: Tensor
    """float32 [B, G, N, D]: row f // block holds the mean of the block whose first key is f."""
    keys: Tensor
    """[B, G, T, D]: the new ones."""
    layout: Layout
    """Where the new keys stand, as queries."""
    block: int


@dataclass(frozen=True, eq=False)
class SummaryProblem:
    """The summaries of texts that are nothing but whole segments: max k, and what max q reads, softmax(max q . K) V."""

    q: Tensor
    """[B, H, N L, D]."""
    k: Tensor
    """[B, G, N L, D]."""
    v: Tensor
    """[B, G, N L, D]."""
    length: int
    """L."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Softmax, gates and sums run in float32, or in float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32
