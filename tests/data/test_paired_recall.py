"""Associative recall in the field's form: facts first, each asked for once, most of them soon."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
from typer.testing import CliRunner

from varifocal.cli.main import app
from varifocal.data import PreparedData, open_data
from varifocal.data.paired_recall import PairedRecall, make_paired_recall
from varifocal.training.probe_accuracy import DistanceAccuracy, chance, gathered, is_probe

WANTED = PairedRecall(length=64, pairs=(2, 8), vocabulary=100)


@pytest.fixture(scope="module")
def recall(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return make_paired_recall(tmp_path_factory.mktemp("recall") / "out", WANTED, texts=300)


def test_it_opens_as_a_probe(recall: PreparedData) -> None:
    opened = open_data(recall.folder, verify="full")
    assert is_probe(opened)
    assert chance(opened) == 1 / 49
    assert opened.manifest.tokenizer.vocabulary == 100
    assert [opened.split(name).documents for name in ("train", "validation", "test")] == [240, 30, 30]


def test_facts_come_first_and_every_key_is_asked_for_once(recall: PreparedData) -> None:
    rows = recall.split("train").rows(length=64)
    answers = rows.answers(numpy.arange(len(rows)))
    asked = numpy.bincount(answers.rows)
    assert set(asked.tolist()) == {2, 8}
    fact = answers.columns - 1 - answers.distances
    assert (fact % 2 == 0).all()
    assert (fact < 2 * asked[answers.rows]).all()
    assert (answers.columns - 1 >= 2 * asked[answers.rows]).all()
    for row in range(len(rows)):
        assert sorted(fact[answers.rows == row].tolist()) == list(range(0, 2 * asked[row], 2))


def test_the_answer_is_the_value_of_its_fact(recall: PreparedData) -> None:
    rows = recall.split("train").rows(length=64)
    numbers = numpy.arange(len(rows))
    tokens, answers = rows.batch(numbers).input_ids, rows.answers(numbers)
    key, value = (tokens[answers.rows, answers.columns - back] for back in (1, 0))
    assert (key == tokens[answers.rows, answers.columns - 1 - answers.distances]).all()
    assert (value == tokens[answers.rows, answers.columns - answers.distances]).all()
    assert ((key >= 2) & (key < WANTED.first_value)).all()
    assert (value >= WANTED.first_value).all()


def test_most_questions_come_soon() -> None:
    from varifocal.data.paired_recall import split_arrays

    arrays = split_arrays(PairedRecall(length=129, pairs=(1,), vocabulary=100), 2000, stream=0)
    assert arrays.answers is not None
    # One fact: places 0 to 62 after it, with a probability like (place + 1)^-0.99.
    weights = numpy.arange(1, 64) ** -0.99
    first = float((arrays.answers[:, 1] == 2).mean())
    expected = weights[0] / weights.sum()
    assert first == pytest.approx(expected, abs=4 * (expected * (1 - expected) / 2000) ** 0.5)


def test_seeds_and_splits_differ_and_repeat() -> None:
    from varifocal.data.paired_recall import split_arrays

    first = split_arrays(WANTED, 5, stream=0).tokens
    assert (split_arrays(WANTED, 5, stream=0).tokens == first).all()
    assert (split_arrays(WANTED, 5, stream=1).tokens != first).any()


def test_too_many_pairs_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"16 facts and their questions do not fit into a text of 64 tokens; ask at most 15"
    ):
        PairedRecall(length=64, pairs=(4, 16))
    with pytest.raises(ValueError, match="has 3 keys, too few for 4 facts"):
        PairedRecall(length=64, pairs=(4,), vocabulary=8)


def test_many_distances_are_told_in_groups() -> None:
    asked = dict.fromkeys(range(1, 21), 2)
    right = dict.fromkeys(range(1, 21), 1)
    assert list(gathered(asked, right)) == [
        DistanceAccuracy(1, 2, 1),
        DistanceAccuracy(2, 2, 1),
        DistanceAccuracy(4, 4, 2),
        DistanceAccuracy(8, 8, 4),
        DistanceAccuracy(16, 16, 8),
        DistanceAccuracy(32, 8, 4),
    ]
    assert list(gathered({3: 2, 5: 4}, {3: 1, 5: 0})) == [DistanceAccuracy(3, 2, 1), DistanceAccuracy(5, 4, 0)]


def test_folder_is_opened_by_name(recall: PreparedData, tmp_path: Path) -> None:
    assert make_paired_recall(tmp_path / "again", WANTED, texts=300).fingerprint == recall.fingerprint


def test_command_makes_it_and_says_what_a_guess_is_worth(tmp_path: Path) -> None:
    asked = ["data", "pairs", str(tmp_path / "out"), "--texts", "30", "--length", "64", "--pairs", "2,8"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert "a guess is right 0.02% of the time" in " ".join(done.output.split())
    assert open_data(tmp_path / "out").manifest.source["pairs"] == [2, 8]
