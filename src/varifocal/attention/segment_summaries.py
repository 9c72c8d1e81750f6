"""The summaries of complete segments, kept while tokens arrive: what `combiner` reads when it decodes."""

from __future__ import annotations

import torch
from torch import Tensor

from varifocal.kernels.native.combiner import summarize_full


class SegmentSummaries:
    """A store of summaries for a text of one document; each segment is read once, when its last token is there.

    Pass `rows` as Segments(summaries=...) together with the cache's keys.
    """

    def __init__(self, *, length: int) -> None:
        self.length = length
        self.rows: Tensor | None = None
        """[B, H, N, 2 D]: summary key and value of each of N complete segments; None before the first one is."""

    def update(self, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """Take in all queries [B, H, S, D], keys and values [B, G, S, D] so far; known segments are not read again."""
        known = 0 if self.rows is None else self.rows.shape[2]
        complete = keys.shape[2] // self.length
        if complete == known:
            return
        new = slice(known * self.length, complete * self.length)
        rows = torch.cat(
            summarize_full(queries[:, :, new], keys[:, :, new], values[:, :, new], length=self.length), dim=-1
        )
        self.rows = rows if self.rows is None else torch.cat((self.rows, rows), dim=2)
