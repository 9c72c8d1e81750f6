"""A reading in plain torch, all pairs of some queries at a time: what FlexAttention's functions mean, differentiable.

It gives the logsumexp where a compiled kernel cannot (on a CPU), and lets the gradients of the very functions that a
GPU's kernel is generated from be compared with the reference's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from varifocal.equations.problem import accumulation_dtype
from varifocal.kernels.flex.reading import Reading

PAIRS_AT_A_TIME = 1 << 22


def attend_dense(reading: Reading, *, at_end: bool = False) -> tuple[Tensor, Tensor]:
    """The output [B, H, T, D] and logsumexp [B, H, T] of a reading; 0 and minus infinity where nothing is read."""
    dtype = accumulation_dtype(reading.q.dtype)
    scores = score_pairs(reading, 0, reading.q.shape[2])
    blind = (scores == float("-inf")).all(dim=-1)
    # Where nothing is read the softmax is taken of zeros, and left out: minus infinity throughout has no gradient.
    scores = scores.masked_fill(blind[..., None], 0.0)
    probabilities = scores.softmax(dim=-1).masked_fill(blind[..., None], 0.0)
    values = reading.v.to(dtype).repeat_interleave(reading.q.shape[1] // reading.v.shape[1], dim=1)
    output = (probabilities @ values).to(reading.q.dtype)
    return output, scores.logsumexp(dim=-1).masked_fill(blind, float("-inf"))


def find_logsumexp(reading: Reading) -> Tensor:
    """The logsumexp [B, H, T] alone, a few queries at a time; no gradient."""
    batch, heads, queries, _ = reading.q.shape
    at_once = max(1, PAIRS_AT_A_TIME // max(1, batch * heads * reading.k.shape[2]))
    with torch.no_grad():
        parts = [
            score_pairs(reading, begin, min(queries, begin + at_once)).logsumexp(dim=-1)
            for begin in range(0, queries, at_once)
        ]
    return torch.cat(parts, dim=-1)


def score_pairs(reading: Reading, begin: int, end: int) -> Tensor:
    """Scores [B, H, T', S] of the queries begin..end, with log-weights; minus infinity where a pair is not read."""
    dtype = accumulation_dtype(reading.q.dtype)
    heads = reading.q.shape[1]
    keys = reading.k.to(dtype).repeat_interleave(heads // reading.k.shape[1], dim=1)
    products = reading.q[:, :, begin:end].to(dtype) @ keys.mT
    pairs = reading.of_queries(begin, end)
    scores = reading.rate(products * reading.score.scale, *pairs)
    return scores.masked_fill(~reading.mask(*pairs), float("-inf"))
