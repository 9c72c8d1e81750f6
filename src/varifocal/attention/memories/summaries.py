"""Keys, values and queries of all tokens, and the summaries of complete segments, each made once."""

from __future__ import annotations

import torch
from torch import Tensor

from varifocal.attention.backends import prepare
from varifocal.attention.memories.base import Memory, Remembered
from varifocal.equations.layout import Layout
from varifocal.equations.problem import Shortcuts, SummaryProblem


class SegmentSummaries(Memory):
    """What `combiner` reads: a segment's summary is what its pooled queries read of its keys and values."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.segment = length
        """Keys in a segment."""
        self.summaries: Tensor | None = None
        """[B, H, N, 2 D]: summary key and value of each of N complete segments of a text of one document."""
        self.summarized = 0
        """Tokens that were there when the summaries were last brought up to date."""

    def notes(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """The queries [B, H, T, D]."""
        return {"queries": q}

    def shortcuts(self, remembered: Remembered, *, new: int, layout: Layout | None) -> Shortcuts | None:
        queries, k, v = remembered.notes["queries"], remembered.k, remembered.v
        length = k.shape[2]
        one_document = layout is None or layout.one_document
        # Segments of packed documents begin at every document; only those of one text lie at multiples of the length.
        if new == length or not one_document or (torch.is_grad_enabled() and k.requires_grad):
            self.forget_shortcuts()
            return None
        # Tokens came or went without a call of this: what was summarized may not be there any more.
        if self.summarized != length - new:
            self.forget_shortcuts()
        known = 0 if self.summaries is None else self.summaries.shape[2]
        complete = length // self.segment
        if complete > known:
            added = slice(known * self.segment, complete * self.segment)
            problem = SummaryProblem(queries[:, :, added], k[:, :, added], v[:, :, added], self.segment)
            found: Tensor = prepare("auto", problem, device=k.device.type)()
            self.summaries = found if self.summaries is None else torch.cat((self.summaries, found), dim=2)
        self.summarized = length
        return None if self.summaries is None else Shortcuts(segment_summaries=self.summaries)

    def forget_shortcuts(self) -> None:
        self.summaries, self.summarized = None, 0

    @property
    def bytes(self) -> int:
        made = 0 if self.summaries is None else self.summaries.numel() * self.summaries.element_size()
        return super().bytes + made
