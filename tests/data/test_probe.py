"""The probe: facts, questions at the asked distance, and answers that can be found again."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest

from varifocal.data import PreparedData, open_data
from varifocal.data.probe import Probe, make_probe

PROBE = Probe(length=128, questions=6, distances=(4, 16, 100), keys=12, values=10, noise=20)


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return make_probe(tmp_path_factory.mktemp("probe") / "out", PROBE, texts=400)


def test_probe_opens_like_any_data(probe: PreparedData) -> None:
    opened = open_data(probe.folder, verify="full")
    assert opened.manifest.kind == "probe"
    assert [opened.split(name).documents for name in ("train", "validation", "test")] == [320, 40, 40]
    row = opened.split("train").rows(length=128)[5]
    assert row.positions.tolist() == list(range(128))
    assert set(row.documents.tolist()) == {5}
    assert row.input_ids[-1] == opened.split("train").end


def test_every_answer_stands_after_its_question_and_its_fact(probe: PreparedData) -> None:
    rows = probe.split("train").rows(length=128)
    numbers = numpy.arange(len(rows))
    tokens, answers = rows.batch(numbers).input_ids, rows.answers(numbers)
    assert len(answers.rows) == 6 * len(rows)
    key = tokens[answers.rows, answers.columns - 1]
    assert (key == tokens[answers.rows, answers.columns - 1 - answers.distances]).all()
    value = tokens[answers.rows, answers.columns]
    assert (value == tokens[answers.rows, answers.columns - answers.distances]).all()
    assert ((PROBE.first_key <= key) & (key < PROBE.first_value)).all()
    assert ((PROBE.first_value <= value) & (value < PROBE.first_noise)).all()


def test_key_stands_only_in_its_fact_and_its_question(probe: PreparedData) -> None:
    tokens = probe.split("train").rows(length=128).batch([0, 1, 2]).input_ids
    for row in tokens:
        keys = row[(row >= PROBE.first_key) & (row < PROBE.first_value)]
        assert sorted(numpy.unique(keys, return_counts=True)[1].tolist()) == [2] * 6


def test_distances_are_drawn_evenly(probe: PreparedData) -> None:
    answers = probe.split("train").answers
    assert answers is not None
    distances, counts = numpy.unique(answers.distances, return_counts=True)
    assert distances.tolist() == [4, 16, 100]
    assert counts / counts.sum() == pytest.approx([1 / 3] * 3, abs=4 * (2 / 9 / counts.sum()) ** 0.5)


def test_what_lies_in_a_window_does_not_tell_the_answer(probe: PreparedData) -> None:
    # Of a question 100 back, the 50 tokens before it hold the value only by chance, as other facts may have it too.
    rows = probe.split("train").rows(length=128)
    numbers = numpy.arange(len(rows))
    tokens, answers = rows.batch(numbers).input_ids, rows.answers(numbers)
    far = answers.distances == 100
    seen = [
        bool((tokens[row, max(0, column - 51) : column - 1] == tokens[row, column]).any())
        for row, column in zip(answers.rows[far], answers.columns[far], strict=True)
    ]
    assert numpy.mean(seen) < 0.6
    near = answers.distances == 4
    assert all(
        (tokens[row, column - 4 : column] == tokens[row, column]).any()
        for row, column in zip(answers.rows[near], answers.columns[near], strict=True)
    )


def test_splits_hold_different_texts(probe: PreparedData) -> None:
    found = [
        {probe.split(name).document(number).tobytes() for number in range(probe.split(name).documents)}
        for name in ("train", "validation", "test")
    ]
    assert len(found[0] | found[1] | found[2]) == 400


def test_seed_decides_the_texts(tmp_path: Path, probe: PreparedData) -> None:
    assert make_probe(tmp_path / "same", PROBE, texts=400).fingerprint == probe.fingerprint
    other = Probe(length=128, questions=6, distances=(4, 16, 100), keys=12, values=10, noise=20, seed=1)
    assert make_probe(tmp_path / "other", other, texts=400).fingerprint != probe.fingerprint


def test_bytes_are_those_of_the_decoded_text(probe: PreparedData) -> None:
    split, tokenizer = probe.split("validation"), probe.tokenizer()
    for number in range(3):
        text = tokenizer.decode(split.document(number)[:-1])
        assert split.document_bytes(number) == len(text.encode())
        assert tokenizer.encode(text) == split.document(number)[:-1].tolist()


def test_answers_of_chosen_rows_are_theirs(probe: PreparedData) -> None:
    rows = probe.split("train").rows(length=128)
    everything = rows.answers(numpy.arange(len(rows)))
    some = rows.answers([7, 3])
    for place, number in enumerate((7, 3)):
        assert some.columns[some.rows == place].tolist() == everything.columns[everything.rows == number].tolist()


def test_text_has_no_answers(data: PreparedData) -> None:
    assert data.split("train").answers is None
    with pytest.raises(ValueError, match="make some with 'varifocal data probe'"):
        data.split("train").rows(length=64).answers([0])


def test_existing_folder_is_left_alone(probe: PreparedData) -> None:
    with pytest.raises(ValueError, match="already exists; choose another folder"):
        make_probe(probe.folder, PROBE, texts=4)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"distances": (1,)}, "distances must be between 2 and length - 3 = 1021"),
        ({"distances": (1022,)}, "distances must be between 2 and"),
        ({"distances": ()}, "distances must be between 2 and"),
        ({"questions": 65}, "at most the 64 keys, got 65"),
        ({"length": 40}, "crowd a text of 40 tokens|distances must be"),
        ({"values": 1}, "needs at least 2 values"),
    ],
)
def test_impossible_probe_is_explained(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Probe(**options)  # type: ignore[arg-type]
