"""What the model is fed with, in the order that the seed fixes: the same for every mechanism, from any step on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from varifocal.data import Batches, Rows
from varifocal.model.loss import IGNORED


class MicroBatches(IterableDataset[dict[str, Tensor]]):
    """The batches of this process from a step on, without end, each cut into micro-batches of so many rows."""

    def __init__(self, batches: Batches, *, micro_batch: int, start_step: int) -> None:
        super().__init__()
        self.batches, self.micro_batch, self.start_step = batches, micro_batch, start_step

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for step in count(self.start_step):
            rows = self.batches.at(step)
            for begin in range(0, self.batches.batch_size, self.micro_batch):
                part = slice(begin, begin + self.micro_batch)
                yield model_inputs(Rows(*(values[part] for values in rows)), joined=self.batches.rows.joined)


def model_inputs(rows: Rows, *, joined: bool = False) -> dict[str, Tensor]:
    """Tokens, documents, positions and labels [N, L]; the label of a token that nothing predicts is IGNORED.

    Such are the first tokens of documents. The model knows that by itself, but Trainer counts labels, and its count is
    what the loss is divided by. Rows that are one document each need neither documents nor positions.
    """
    ids, documents, positions = (torch.from_numpy(values) for values in rows)
    labels = ids.clone()
    labels[:, 0] = IGNORED
    begins = (documents[:, 1:] != documents[:, :-1]) | (documents[:, 1:] < 0)
    labels[:, 1:].masked_fill_(begins, IGNORED)
    inputs = {"input_ids": ids, "labels": labels}
    return inputs if joined else inputs | {"documents": documents, "position_ids": positions}
