"""Evaluate a model of any kind on prepared data: its loss, and of a probe its recall."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from varifocal.data import PreparedData
from varifocal.results.evaluation import Evaluation
from varifocal.training.evaluation import evaluate
from varifocal.training.opening import open_model_for
from varifocal.training.probe_accuracy import is_probe, probe_accuracy


def evaluate_model(
    source: str | Path,
    data: PreparedData,
    *,
    split: str = "validation",
    length: int | None = None,
    batch_size: int = 4,
    most_tokens: int | None = None,
    on_batch: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """The loss of a model on a split, and for a probe the share of right answers by distance.

    Args:
        source: a model's folder, a run, or a pretrained model.
        data: prepared with the model's tokenizer.
        split: train, validation or test.
        length: tokens of a row; None for the model's context, or the length of a probe's texts.
        batch_size: rows at once.
        most_tokens: stop after so many tokens; None for the whole split.
        on_batch: called with rows done and rows in all.
    """
    model, what = open_model_for(source, data), data.split(split)
    if length is None:
        # A row that holds a text of the probe holds the facts to all of its questions.
        length = data.manifest.source["length"] if is_probe(data) else model.config.max_position_embeddings
    found = evaluate(model, what, length=length, batch_size=batch_size, most_tokens=most_tokens, on_batch=on_batch)
    recall = None
    if is_probe(data):
        answers = probe_accuracy(
            model, what, length=length, batch_size=batch_size, most_tokens=most_tokens, on_batch=on_batch
        )
        recall = tuple(one.record() for one in answers)
    return replace(found, model=str(source), data=str(data.folder), split=split, recall=recall)
