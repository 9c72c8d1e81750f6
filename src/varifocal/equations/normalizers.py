"""How the scores of a branch become weights, where that is not softmax."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Normalizer:
    """Turns the scores of the keys that a branch reads into weights.

    An equation without one takes softmax, exp(s) / sum exp(s). A backend that does not know a normalizer refuses it.
    """


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
