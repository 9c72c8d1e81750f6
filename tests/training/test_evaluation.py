"""Evaluation on prepared data agrees with the model's own loss, and knows bytes from tokens."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.model.models import small_model
from varifocal.data import PreparedData, open_data
from varifocal.data.arrays import write_arrays
from varifocal.data.probe import Probe, make_probe, probe_tokenizer, split_arrays
from varifocal.training.evaluation import curve_edges, evaluate, tokens_before


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    """Tokens that are all to be predicted."""
    probe, folder = Probe(), tmp_path_factory.mktemp("noise") / "n"
    arrays = split_arrays(probe, 20, stream=1)._replace(answers=None)
    write_arrays(
        folder, {"validation": arrays}, kind="text", source={"kind": "noise"}, tokenizer=probe_tokenizer(probe)
    )
    return open_data(folder)


def model_for(data: PreparedData, variant: str = "dense"):  # type: ignore[no-untyped-def]
    return small_model(variant, vocab_size=data.manifest.tokenizer.vocabulary, max_position_embeddings=256)


def test_loss_is_the_mean_of_the_models_own(data: PreparedData) -> None:
    model, split = model_for(data), data.split("validation")
    found = evaluate(model, split, length=96, batch_size=3)
    rows = split.rows(length=96)
    total = count = 0.0
    for index in range(len(rows)):
        row = rows[index]
        ids, documents, positions = (torch.from_numpy(part)[None] for part in row[:3])
        with torch.no_grad():
            loss = model(
                input_ids=ids, documents=documents, position_ids=positions, labels=ids, num_items_in_batch=1
            ).cross_entropy
        total += float(loss)
        count += int(((documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)).sum())
    assert found.tokens == count
    assert found.loss == pytest.approx(total / count, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2) * split.tokens / split.bytes)


def test_loss_of_a_probe_is_that_of_its_answers(tmp_path: Path) -> None:
    probe = make_probe(tmp_path / "p", Probe(length=64, questions=4, distances=(4, 16)), texts=40)
    model, split = model_for(probe), probe.split("validation")
    rows = split.rows(length=64)
    ids, answers = torch.from_numpy(rows.batch([0, 1, 2, 3]).input_ids), rows.answers([0, 1, 2, 3])
    with torch.no_grad():
        logits = model(ids).logits[answers.rows, answers.columns - 1]
    expected = torch.nn.functional.cross_entropy(logits, ids[answers.rows, answers.columns])
    found = evaluate(model, split, length=64)
    assert found.tokens == 16
    assert found.loss == pytest.approx(float(expected), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2) * 16 / split.bytes)


def test_curve_covers_every_token_and_averages_to_the_loss(data: PreparedData) -> None:
    found = evaluate(model_for(data), data.split("validation"), length=96)
    assert sum(point.tokens for point in found.curve) == found.tokens
    mean = sum(point.loss * point.tokens for point in found.curve) / found.tokens
    assert mean == pytest.approx(found.loss)
    assert [point.least for point in found.curve] == [1, 2, 4, 8, 16, 32, 64]


def test_batch_size_does_not_change_the_loss(data: PreparedData) -> None:
    model, split = model_for(data, "context_adaptive"), data.split("validation")
    one, other = (evaluate(model, split, length=64, batch_size=size).loss for size in (1, 7))
    assert one == pytest.approx(other, rel=1e-6)


def test_it_stops_after_the_tokens_asked_for(data: PreparedData) -> None:
    seen: list[tuple[int, int]] = []
    found = evaluate(
        model_for(data), data.split("validation"), length=64, batch_size=2, most_tokens=300,
        on_batch=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert found.tokens <= 300
    assert seen[-1] == (4, 4)


def test_split_that_is_too_short_is_named(data: PreparedData) -> None:
    with pytest.raises(ValueError, match=r"too few for a row of 10000000; use shorter rows"):
        evaluate(model_for(data), data.split("validation"), length=10_000_000)


def test_tokens_before_are_counted_from_the_start_of_each_document() -> None:
    assert tokens_before(torch.tensor([[4, 4, 4, 7, 7, -1]])).tolist() == [[0, 1, 2, 0, 1, 0]]


def test_edges_end_at_the_length() -> None:
    assert curve_edges(8) == [1, 2, 4, 8]
    assert curve_edges(10) == [1, 2, 4, 8, 10]


def test_mode_of_the_model_is_left_as_it_was(data: PreparedData, tmp_path: Path) -> None:
    model = model_for(data).train()
    evaluate(model, data.split("validation"), length=64, most_tokens=64)
    assert model.training
