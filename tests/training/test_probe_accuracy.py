"""The questions of a probe: counted by distance, answered as the logits say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.experiments.comparisons import PROBE
from tests.model.models import small_model
from tests.test_cli import varifocal
from varifocal.data import PreparedData
from varifocal.data.probe import make_probe
from varifocal.model.modeling import VarifocalForCausalLM
from varifocal.training.evaluation import evaluate
from varifocal.training.probe_accuracy import chance, is_probe, probe_accuracy


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return make_probe(tmp_path_factory.mktemp("probe") / "p", PROBE, texts=200)


def guesser(data: PreparedData) -> VarifocalForCausalLM:
    """A model with random weights that tells nothing but values: it is right now and then."""
    model = small_model(vocab_size=data.manifest.tokenizer.vocabulary, tie_word_embeddings=False)
    values = slice(PROBE.first_value, PROBE.first_value + PROBE.values)
    with torch.no_grad():
        kept = model.lm_head.weight[values].clone() * 10
        model.lm_head.weight.zero_()
        model.lm_head.weight[values] = kept
    return model


def test_accuracy_is_that_of_the_logits(data: PreparedData) -> None:
    model, split = guesser(data), data.split("test")
    found = probe_accuracy(model, split, length=64, batch_size=3)
    rows = split.rows(length=64)
    right = dict.fromkeys(PROBE.distances, 0)
    asked = dict(right)
    for index in range(len(rows)):
        answers, ids = rows.answers([index]), torch.from_numpy(rows[index].input_ids)[None]
        with torch.no_grad():
            told = model(ids).logits[0].argmax(dim=-1)
        for column, distance in zip(answers.columns.tolist(), answers.distances.tolist(), strict=True):
            asked[distance] += 1
            right[distance] += int(told[column - 1] == ids[0, column])
    assert {one.distance: (one.questions, one.right) for one in found} == {
        distance: (asked[distance], right[distance]) for distance in asked
    }
    assert 0 < sum(one.right for one in found) < sum(one.questions for one in found)


def test_evaluation_of_a_probe_tells_the_share_of_right_answers(data: PreparedData) -> None:
    model, split = guesser(data), data.split("test")
    found = probe_accuracy(model, split, length=64)
    asked, right = (sum(getattr(one, name) for one in found) for name in ("questions", "right"))
    assert evaluate(model, split, length=64).accuracy == right / asked


def test_question_whose_fact_lies_in_an_earlier_row_is_left_out(data: PreparedData) -> None:
    found = probe_accuracy(guesser(data), data.split("test"), length=16)
    assert [one.distance for one in found] == [4]


def test_it_stops_after_the_tokens_asked_for(data: PreparedData) -> None:
    seen: list[tuple[int, int]] = []
    found = probe_accuracy(
        guesser(data), data.split("test"), length=64, batch_size=2, most_tokens=3 * 64,
        on_batch=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert sum(one.questions for one in found) == 3 * PROBE.questions
    assert seen == [(2, 3), (3, 3)]


def test_mode_of_the_model_is_left_as_it_was(data: PreparedData) -> None:
    model = guesser(data).train()
    probe_accuracy(model, data.split("test"), length=64, most_tokens=64)
    assert model.training


def test_chance_of_a_guess_is_one_over_the_number_of_values(data: PreparedData) -> None:
    assert is_probe(data)
    assert chance(data) == 1 / PROBE.values


def test_evaluate_prints_accuracy_by_distance(data: PreparedData, tmp_path: Path) -> None:
    guesser(data).save_pretrained(tmp_path / "model")
    result = varifocal(
        "evaluate", str(tmp_path / "model"), "--data", str(data.folder), "--json", str(tmp_path / "r.json")
    )
    assert result.returncode == 0, result.stderr
    assert "right answers by distance" in result.stdout
    assert "a guess is right 25.0% of the time" in result.stdout
    assert '"recall"' in (tmp_path / "r.json").read_text()
