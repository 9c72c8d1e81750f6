"""What the model is fed with, in the order that the seed fixes: the same for every mechanism, from any step on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils.data import IterableDataset

from varifocal.data import Batches, PackedRows
from varifocal.model.loss import IGNORED


class MicroBatches(IterableDataset[dict[str, Tensor]]):
    """The batches of this process from a step on, without end, each cut into micro-batches of so many rows."""

    def __init__(self, batches: Batches, *, micro_batch: int, start_step: int) -> None:
        super().__init__()
        self.batches, self.micro_batch, self.start_step = batches, micro_batch, start_step

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for step in count(self.start_step):
            indices = self.batches.indices(step)
            for begin in range(0, self.batches.batch_size, self.micro_batch):
                yield model_inputs(self.batches.rows, indices[begin : begin + self.micro_batch])


def model_inputs(rows: PackedRows, indices: ArrayLike) -> dict[str, Tensor]:
    """Tokens, documents, positions and labels [N, L] of some rows; labels as in `token_labels`.

    The label of a token that nothing predicts, the first of a document, is IGNORED. The model knows that by itself, but
    Trainer counts labels, and its count is what the loss is divided by. Rows that are one document each need neither
    documents nor positions.
    """
    ids, documents, positions = (torch.from_numpy(values) for values in rows.batch(indices))
    labels = token_labels(rows, indices, ids)
    labels[:, 0] = IGNORED
    begins = (documents[:, 1:] != documents[:, :-1]) | (documents[:, 1:] < 0)
    labels[:, 1:].masked_fill_(begins, IGNORED)
    inputs = {"input_ids": ids, "labels": labels}
    return inputs if rows.joined else inputs | {"documents": documents, "position_ids": positions}


def token_labels(rows: PackedRows, indices: ArrayLike, ids: Tensor) -> Tensor:
    """The label of each token [N, L] of some rows: the token itself.

    Of a probe only the answers have one: all else is chance, and would drown what there is to learn.
    """
    if rows.split.answers is None:
        return ids.clone()
    answers = rows.answers(indices)
    labels = torch.full_like(ids, IGNORED)
    labels[answers.rows, answers.columns] = ids[answers.rows, answers.columns]
    return labels
