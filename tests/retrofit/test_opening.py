"""Models of any kind are opened alike: of ours, of a run, or pretrained; and only for data of their own tokens."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.model.models import SIZES, small_model
from varifocal.data import PreparedData
from varifocal.data.probe import Probe, make_probe
from varifocal.model.text import load_text_tokenizer
from varifocal.retrofit.opening import is_ours, model_source, open_model, open_with_tokenizer
from varifocal.training.opening import open_model_for

PROBE = Probe(length=64, questions=2, distances=(4,), keys=8, values=4, noise=8)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return make_probe(tmp_path_factory.mktemp("probe") / "data", PROBE, texts=20)


@pytest.fixture
def run(data: PreparedData, tmp_path: Path) -> Path:
    """A run's folder with a model and its tokenizer."""
    entry = data.manifest.tokenizer
    small_model("head_gated", vocab_size=entry.vocabulary, eos_token_id=entry.end).save_pretrained(tmp_path / "model")
    shutil.copyfile(data.folder / entry.file, tmp_path / "model" / "tokenizer.json")
    return tmp_path


def test_model_of_a_run_is_the_one_in_its_folder(run: Path) -> None:
    assert model_source(run) == str(run / "model")
    assert open_model(run).config.mechanism == open_model(run / "model").config.mechanism == "head_gated"


def test_pretrained_model_is_opened_as_it_is(tmp_path: Path) -> None:
    Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(tmp_path / "qwen")
    assert not is_ours(tmp_path / "qwen")
    assert open_model(tmp_path / "qwen", dtype=torch.float32).config.mechanism == "dense"
    with pytest.raises(ValueError, match="has no tokenizer"):
        open_with_tokenizer(tmp_path / "qwen")


def test_broken_config_is_explained_by_our_own_loader(run: Path) -> None:
    (run / "model" / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        open_model(run)


def test_end_of_a_document_is_the_one_that_the_model_was_trained_with(data: PreparedData, run: Path) -> None:
    _, tokenizer = open_with_tokenizer(run)
    assert tokenizer.eos_token == data.manifest.tokenizer.end_token
    (run / "model" / "config.json").unlink()
    assert load_text_tokenizer(run / "model").eos_token is None


def test_model_is_opened_for_data_of_its_own_tokens(data: PreparedData, run: Path, tmp_path: Path) -> None:
    assert open_model_for(run, data).config.vocab_size == data.manifest.tokenizer.vocabulary
    other = make_probe(tmp_path / "other", Probe(length=64, questions=2, distances=(4,), keys=9), texts=20)
    with pytest.raises(ValueError, match="the model uses a tokenizer of fingerprint"):
        open_model_for(run, other)
    (run / "model" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has \d+ different tokens, .* knows \d+; prepare the data with the model's"):
        open_model_for(run, other)
