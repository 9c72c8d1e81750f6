"""How the scores of a branch become weights, where that is not softmax."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Normalizer:
    """Turns the scores of the keys that a branch reads into weights.

    An equation without one takes softmax, exp(s) / sum exp(s). A backend that does not know a normalizer refuses it.
    """

    def keys_read(self, keys: float, features: int | None) -> float:
        """How many keys are worth the work of reading that many, for scores that are products of so many features."""
        return keys


@dataclass(frozen=True, eq=False)
class SinkLogit(Normalizer):
    """exp(s) / (exp(logit) + sum exp(s)): a key without a value takes what a head does not want to read, as in gpt-oss.

    It is in the sum of every branch. The logsumexp of an answer remains that of the keys alone.
    """

    logit: Tensor
    """[H]: one for each query head; minus infinity for softmax."""

    def share(self, logsumexp: Tensor) -> Tensor:
        """What is left for the keys [B, H, T], from the logsumexp [B, H, T] of their scores; 0 where there is none."""
        nothing = logsumexp == float("-inf")
        # A logit of minus infinity where nothing is read would make NaN of both.
        above = logsumexp.masked_fill(nothing, 0.0) - self.logit.to(logsumexp.dtype)[:, None]
        return above.sigmoid().masked_fill(nothing, 0.0)


LEAST_ALPHA = 1.01
"""The alpha nearest to softmax: below, 1 / (alpha - 1) is a power of hundreds, and nothing of it is told apart."""
HALVINGS = 12
NEWTON_STEPS = 60
"""At the most: f is convex and falls, so that steps from the left never overshoot, and the last ones double digits."""


@dataclass(frozen=True, eq=False)
class Entmax(Normalizer):
    """p = [(alpha - 1) s - tau]_+^(1 / (alpha - 1)) with the tau for which the weights of a query sum to 1.

    alpha = 1 would be softmax, 2 is sparsemax; in between, keys that score far below the best have a weight of exactly
    0. Peters et al., arXiv:1905.05702; a learned alpha for each head: Correia et al., arXiv:1909.00015.
    """

    alpha: Tensor
    """[H]: above 1, at most 2."""

    def weigh(self, scores: Tensor) -> Tensor:
        """The weights of scores [B, H, T, K], minus infinity for what is not read; differentiable in scores and alpha.

        A query that reads nothing has weights of 0.
        """
        if scores.shape[-1] == 0:
            return scores
        alpha = self.alpha.to(scores.dtype)[:, None, None]
        unread = scores == float("-inf")
        z = (alpha - 1) * scores.masked_fill(unread, 0.0)
        power = 1 / (alpha - 1)
        with torch.no_grad():
            tau = threshold(z.masked_fill(unread, float("-inf")), power)
        base = (z - tau).clamp(min=0).masked_fill(unread, 0.0)
        # One step of Newton from the solution: it changes nothing, and carries the gradient that tau has as an
        # implicit function of the scores and of alpha.
        steepness = (power * base ** (power - 1)).masked_fill(base == 0, 0.0).sum(dim=-1, keepdim=True).detach()
        excess = (base**power).sum(dim=-1, keepdim=True) - 1
        tau = tau + excess / steepness.masked_fill(steepness == 0, 1.0)
        return (z - tau).clamp(min=0).masked_fill(unread, 0.0) ** power


def threshold(z: Tensor, power: Tensor) -> Tensor:
    """tau [..., 1] with sum [z - tau]_+^power = 1, for z [..., K] (minus infinity: not there) and powers of 1 or more.

    Between max z - 1, where the largest alone makes 1, and max z. Halved a few times, then Newton from the left.
    """
    highest = z.amax(dim=-1, keepdim=True)
    highest = torch.where(highest == float("-inf"), 0.0, highest)
    low, high = highest - 1, highest.clone()
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        above = ((z - middle).clamp(min=0) ** power).sum(dim=-1, keepdim=True) >= 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    tau = low
    for _ in range(NEWTON_STEPS):
        base = (z - tau).clamp(min=0)
        weights = base**power
        excess = weights.sum(dim=-1, keepdim=True) - 1
        slope = (power * weights / base).masked_fill(base == 0, 0.0).sum(dim=-1, keepdim=True)
        moved = torch.where(slope > 0, tau + excess / slope, tau)
        # To the right only: what goes back is rounding.
        if not torch.compiler.is_compiling() and not bool((moved > tau).any()):
            break
        tau = torch.maximum(moved, tau)
    return tau


@dataclass(frozen=True)
class Polynomial(Normalizer):
    """f(s) / sum f(s) with f = 1 + s, or 1 + s + s^2 / 2: Gerami et al., FAST, arXiv:2402.07901.

    Of order 2 the sum is at least half of the number of keys; of order 1 scores should lie between -1 and 1.
    """

    order: int

    def __post_init__(self) -> None:
        if self.order not in (1, 2):
            raise ValueError(f"the order of a polynomial must be 1 or 2, got {self.order}")

    def keys_read(self, keys: float, features: int | None) -> float:
        """Sums that go on along the text take the place of the keys: a row for each product of features."""
        if features is None:
            return keys
        # A row costs half of what a key costs to read, and half to add the token's own.
        return min(keys, 1 + features + (features**2 if self.order == 2 else 0))

    def weigh(self, scores: Tensor) -> Tensor:
        """The weights of scores [B, H, T, K], minus infinity for what is not read; 0 where nothing is."""
        unread = scores == float("-inf")
        s = scores.masked_fill(unread, 0.0)
        weights = (1 + s if self.order == 1 else 1 + s + s * s / 2).masked_fill(unread, 0.0)
        total = weights.sum(dim=-1, keepdim=True)
        return weights / torch.where(total.abs() < 1e-6, 1e-6, total)
