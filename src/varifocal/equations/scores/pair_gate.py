"""A learned gate on every pair of query and key: Adaptive Sparse-Geometric Attention (ASGA), equations 1 to 3."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from varifocal.equations.scores.base import Pairs, Score
from varifocal.equations.scores.dot import is_one

PairForm = Literal["product", "log", "threshold"]


@dataclass(frozen=True, eq=False)
class PairGate(Score):
    """alpha_ij = scale_h * q.k / sqrt(D), gated by s_ij = sigmoid(output_h . GELU(a_i + b_j) + bias_h).

    "product" is the paper's alpha * s: a closed gate sends the score to 0, which flattens attention and does
    not make it sparse. "log" is alpha + log s, where a closed gate does remove the pair. "threshold" is the
    same, and pairs with s below `threshold` are not read at all.

    The first layer of the pair network acts on [LN q ; LN k] and is linear, so it splits into a part of the
    query and a part of the key, which are given here: no tensor of pairs x 2D exists.
    """

    queries: Tensor
    """a [B, H, T, P]: the query's half of the hidden layer."""
    keys: Tensor
    """b [B, H, S, P]: the key's half of the hidden layer."""
    output: Tensor
    """[H, P]: the output layer."""
    bias: Tensor | None = None
    """[H]: the output layer's bias."""
    scale: Tensor | None = None
    """[H]: the factor of the dot product; None for 1."""
    form: PairForm = "product"
    threshold: float = 0.1
    """The least gate that is read, for form="threshold"."""

    def __post_init__(self) -> None:
        if self.form not in ("product", "log", "threshold"):
            raise ValueError(f"pair gate form must be 'product', 'log' or 'threshold', got {self.form!r}")
        if not 0 < self.threshold < 1:
            raise ValueError(f"pair gate threshold must lie between 0 and 1, got {self.threshold}")

    def gate_logits(self) -> Tensor:
        """[B, H, T, S]: the logit of every pair's gate, one hidden unit at a time."""
        logits = self.queries.new_zeros(*self.queries.shape[:3], self.keys.shape[2])
        if self.bias is not None:
            logits = logits + self.bias[:, None, None]
        for unit in range(self.output.shape[1]):
            hidden = F.gelu(self.queries[..., unit, None] + self.keys[..., None, :, unit])  # [B, H, T, S]
            logits = logits + self.output[:, unit, None, None] * hidden
        return logits

    def prepare(self, dtype: torch.dtype, blind_query: Tensor, unseen_key: Tensor) -> PairGate:
        return replace(
            self,
            queries=self.queries.to(dtype).masked_fill(blind_query, 0.0),
            keys=self.keys.to(dtype).masked_fill(unseen_key, 0.0),
            output=self.output.to(dtype),
            bias=None if self.bias is None else self.bias.to(dtype),
            scale=None if self.scale is None else self.scale.to(dtype),
        )

    def of_queries(self, part: slice) -> PairGate:
        return replace(self, queries=self.queries[:, :, part])

    @property
    def rates_summaries(self) -> bool:
        return False

    def rate_blocks(self, products: Tensor, *, head_width: int) -> Tensor:
        """A block has no pair gate: it is ranked by its dot product alone."""
        return products

    def pair_flops(self) -> float:
        return 3.0 * self.output.shape[1]

    def pair_functions(self) -> float:
        return 1.0 + self.output.shape[1]

    def is_neutral(self) -> bool:
        """With a zero output layer every pair has the same gate: alpha + log s moves all scores alike."""
        if bool((self.output != 0).any()):
            return False
        gate = torch.sigmoid(torch.zeros(1) if self.bias is None else self.bias.detach().float())
        scale = torch.ones(1) if self.scale is None else self.scale.detach().float()
        if self.form == "product":
            return is_one(gate * scale)
        return is_one(scale) and (self.form == "log" or bool((gate >= self.threshold).all()))

    def rate(self, products: Tensor, pairs: Pairs) -> Tensor:
        alpha = products / math.sqrt(pairs.head_width)
        if self.scale is not None:
            alpha = alpha * self.scale[:, None, None]
        return self.gated(alpha, self.gate_logits())

    def gated(self, alpha: Tensor, logits: Tensor) -> Tensor:
        """The score of pairs from their scaled dot products and the logits of their gates, of one shape."""
        if self.form == "product":
            return alpha * logits.sigmoid()
        scores = alpha + F.logsigmoid(logits)
        if self.form == "threshold":
            scores = scores.masked_fill(logits.sigmoid() < self.threshold, float("-inf"))
        return scores
