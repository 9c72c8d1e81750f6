"""How often a model answers the questions of a probe, by how far back their facts lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy
import torch

from varifocal.data import PackedRows, PreparedData, TokenSplit
from varifocal.model.modeling import VarifocalForCausalLM
from varifocal.results.comparison import Recall

MOST_DISTANCES = 16
"""More distances than this are told in groups."""


@dataclass(frozen=True)
class DistanceAccuracy:
    """The questions at one distance."""

    distance: int
    """The distance itself or, where there are many, the largest of those counted together."""
    questions: int
    right: int

    @property
    def accuracy(self) -> float:
        """The share of right answers."""
        return self.right / self.questions

    def record(self) -> Recall:
        """As result files hold it."""
        return Recall(distance=self.distance, questions=self.questions, right=self.right, accuracy=self.accuracy)


@torch.no_grad()
def probe_accuracy(
    model: VarifocalForCausalLM,
    split: TokenSplit,
    *,
    length: int,
    batch_size: int = 8,
    most_tokens: int | None = None,
    on_batch: Callable[[int, int], None] | None = None,
) -> tuple[DistanceAccuracy, ...]:
    """The accuracy by distance: an answer is right if no other token is more probable.

    Args:
        model: in any mode; it is put into evaluation mode and back.
        split: of a probe.
        length: tokens of a row, the length of the probe's texts. In shorter rows, questions whose fact stands in an
            earlier row are left out.
        batch_size: rows at once.
        most_tokens: stop after so many tokens; None for the whole split.
        on_batch: called with rows done and rows in all.
    """
    rows = split.rows(length=length)
    count = len(rows) if most_tokens is None else min(len(rows), max(1, most_tokens // length))
    asked: dict[int, int] = {}
    right: dict[int, int] = {}
    before = model.training
    model.eval()
    try:
        for begin in range(0, count, batch_size):
            done = min(begin + batch_size, count)
            for distance, is_right in answer(model, rows, list(range(begin, done))):
                asked[distance] = asked.get(distance, 0) + 1
                right[distance] = right.get(distance, 0) + is_right
            if on_batch is not None:
                on_batch(done, count)
    finally:
        model.train(before)
    return tuple(gathered(asked, right))


def gathered(asked: dict[int, int], right: dict[int, int]) -> Iterator[DistanceAccuracy]:
    """The accuracy at each distance; of more than MOST_DISTANCES of them, those up to 1, 2, 4, 8, ... together."""
    few = len(asked) <= MOST_DISTANCES
    groups: dict[int, list[int]] = {}
    for distance in sorted(asked):
        groups.setdefault(distance if few else 1 << (distance - 1).bit_length(), []).append(distance)
    for upto, members in groups.items():
        yield DistanceAccuracy(upto, sum(map(asked.__getitem__, members)), sum(map(right.__getitem__, members)))


def answer(model: VarifocalForCausalLM, rows: PackedRows, indices: list[int]) -> list[tuple[int, bool]]:
    """The distance of every question in some rows whose fact they hold, and whether the model answers it."""
    batch, answers = rows.batch(indices), rows.answers(indices)
    ids, documents, positions = (torch.from_numpy(part).to(model.device) for part in batch[:3])
    # The question stands before its answer, and its fact begins `distance` tokens before the question.
    held = numpy.flatnonzero(answers.columns - 1 - answers.distances >= 0)
    row, column, distance = (part[held] for part in answers)
    hidden = model.model(input_ids=ids, documents=documents, position_ids=positions, use_cache=False).last_hidden_state
    told = model.lm_head(hidden[row, column - 1]).argmax(dim=-1).cpu().numpy()
    return list(zip(distance.tolist(), (told == batch.input_ids[row, column]).tolist(), strict=True))


def chance(data: PreparedData) -> float:
    """The share of right answers for one who knows the values and guesses."""
    return 1 / int(data.manifest.source["values"])


def is_probe(data: PreparedData) -> bool:
    """Whether the data are questions made by `varifocal data probe`."""
    return data.manifest.kind == "probe"
