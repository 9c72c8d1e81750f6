"""Sinks: the first tokens of a document beside a window, Xiao et al., arXiv:2309.17453; a logit in softmax, gpt-oss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from varifocal.attention.gates import CLOSED
from varifocal.equations.branches import Branch, Prefix
from varifocal.equations.normalizers import SinkLogit


def with_sinks(window: Branch, sinks: int) -> Branch:
    """One softmax over a window and the first `sinks` tokens of the document; the window alone if there are none."""
    return window | Prefix(sinks) if sinks else window


def words_of_sinks(sinks: int) -> str:
    """What they add to a window's words."""
    return f" and the first {sinks} of the text" if sinks else ""


class SinkLogits(nn.Module):
    """One learned number for each query head, whose exponential is added to the sum of the head's softmax."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.zeros(heads))

    def reset_parameters(self) -> None:
        """As one more key that has the score 0."""
        nn.init.zeros_(self.logit)

    def close(self) -> None:
        """Take nearly nothing."""
        nn.init.constant_(self.logit, CLOSED)

    def normalizer(self, heads: tuple[int, ...] | None = None) -> SinkLogit:
        """Of all heads, or of some."""
        logit: Tensor = self.logit
        return SinkLogit(logit if heads is None else logit[list(heads)])
