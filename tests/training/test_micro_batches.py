"""What the model is fed with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from varifocal.data import PreparedData
from varifocal.data.probe import Probe, make_probe
from varifocal.model.loss import IGNORED
from varifocal.training.micro_batches import model_inputs


@pytest.fixture
def probe(tmp_path: Path) -> PreparedData:
    return make_probe(tmp_path / "probe", Probe(length=64, questions=4, distances=(4, 32)), texts=50)


def test_only_the_answers_of_a_probe_have_labels(probe: PreparedData) -> None:
    rows = probe.split("train").rows(length=64)
    indices = [3, 0, 7]
    inputs = model_inputs(rows, indices)
    answers = rows.answers(indices)
    places = torch.zeros(3, 64, dtype=torch.bool)
    places[answers.rows, answers.columns] = True
    assert int(places.sum()) == 12
    assert torch.equal(inputs["labels"] != IGNORED, places)
    assert torch.equal(inputs["labels"][places], inputs["input_ids"][places])


def test_labels_are_what_the_facts_say(probe: PreparedData) -> None:
    rows = probe.split("train").rows(length=64)
    inputs = model_inputs(rows, [5])
    answers = rows.answers([5])
    # The fact's value stands after its key, `distance` tokens before the question, after which the answer stands.
    told = inputs["input_ids"][0, answers.columns - answers.distances]
    assert torch.equal(inputs["labels"][0, answers.columns], told)
