"""Saving and loading: bit by bit the same model, or one sentence that says why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.model.models import VARIANTS, mechanisms, random_tokens, saved_fields, small_config, small_model
from varifocal.model import VarifocalForCausalLM, load_model


@pytest.mark.parametrize("variant", VARIANTS)
def test_loaded_model_is_the_saved_one_bit_by_bit(variant: str, tmp_path: Path) -> None:
    model = small_model(variant)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert saved_fields(loaded.config) == saved_fields(model.config)
    saved = model.state_dict()
    assert loaded.state_dict().keys() == saved.keys()
    assert all(torch.equal(value, saved[name]) for name, value in loaded.state_dict().items())
    tokens = random_tokens(2, 12)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_auto_class_loads_the_same(tmp_path: Path) -> None:
    model = small_model("context_adaptive")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is VarifocalForCausalLM
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_loading_keeps_the_saved_dtype_unless_another_is_asked_for(tmp_path: Path) -> None:
    small_model().bfloat16().save_pretrained(tmp_path)
    assert load_model(tmp_path).dtype == torch.bfloat16
    assert load_model(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_tied_head_is_the_embedding_after_loading(tmp_path: Path) -> None:
    small_model().save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = load_model(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_untied_head_is_saved_apart(tmp_path: Path) -> None:
    model = small_model(tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.lm_head.weight is not loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_can_be_resized(tied: bool) -> None:
    model, tokens = small_model(tie_word_embeddings=tied), random_tokens(2, 8)
    with torch.no_grad():
        before = model(tokens).logits
        model.resize_token_embeddings(70, mean_resizing=False)
        after = model(tokens).logits
    assert (model.config.vocab_size, after.shape[-1]) == (70, 70)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    torch.testing.assert_close(after[..., : before.shape[-1]], before)


def test_mechanism_that_a_checkpoint_lacks_starts_as_a_new_one(tmp_path: Path) -> None:
    dense = small_model("dense")
    dense.save_pretrained(tmp_path)
    model = VarifocalForCausalLM.from_pretrained(tmp_path, config=small_config("dynamic_sparse"))
    mechanism = mechanisms(model)[0]
    assert torch.equal(mechanism.query_weight[0], mechanism.key_weight[0])
    assert mechanism.query_weight.std() > 0.1
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(model.state_dict()[name], dense.state_dict()[name])


def test_gates_that_a_checkpoint_lacks_start_at_one_half(tmp_path: Path) -> None:
    small_model("dense").save_pretrained(tmp_path)
    model = VarifocalForCausalLM.from_pretrained(tmp_path, config=small_config("context_adaptive"))
    for mechanism in mechanisms(model):
        assert not mechanism.gate.output.weight.any()
        assert not mechanism.width.weight.any()
        assert mechanism.gate.warmth == 1


def test_part_of_a_mechanism_that_was_loaded_is_kept(tmp_path: Path) -> None:
    saved = small_model("dynamic_sparse")
    saved.save_pretrained(tmp_path)
    name = "model.layers.0.self_attn.mechanism.key_weight"
    change_tensors(tmp_path, lambda tensors: tensors.pop(name))
    model = VarifocalForCausalLM.from_pretrained(tmp_path)
    loaded, kept = (mechanisms(one)[0].query_weight for one in (model, saved))
    assert torch.equal(loaded, kept)


def change_tensors(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:3000])


GATE = "model.layers.1.self_attn.mechanism.gate.output.weight"
MISTAKES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing tensor": (lambda folder: change_tensors(folder, lambda found: found.pop(GATE)), f"missing: {GATE}"),
    "wrong shape": (
        lambda folder: change_tensors(folder, lambda found: found.update({GATE: torch.zeros(3, 3)})),
        r"gate.output.weight has shape \(3, 3\) and should have \(4, 24\)",
    ),
    "unknown tensor": (
        lambda folder: change_tensors(folder, lambda found: found.update(spare=torch.zeros(3))),
        "does not have: spare",
    ),
    "unknown mechanism": (lambda folder: change_config(folder, mechanism="head_gate"), "did you mean 'head_gated'"),
    "unknown option": (lambda folder: change_config(folder, mechanism_options={"windw": 3}), "did you mean 'window'"),
    "another mechanism": (
        lambda folder: change_config(folder, mechanism="dense", mechanism_options={}),
        "does not have: .*gate.* and 3 more",
    ),
    "size of the wrong kind": (lambda folder: change_config(folder, hidden_size="wide"), "expected int, got str"),
    "model of another type": (lambda folder: change_config(folder, model_type="qwen3"), "of type 'qwen3'"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
    "list for a config": (lambda folder: (folder / "config.json").write_text("[]"), "of type None"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "there is no config.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "cannot be read: .*no file named"),
    "weights cut short": (cut_weights, "cannot be read"),
    "garbage for weights": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"garbage" * 99),
        "cannot be read",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_bad_checkpoint_is_explained_in_one_line(mistake: str, tmp_path: Path) -> None:
    small_model("head_gated").save_pretrained(tmp_path)
    spoil, message = MISTAKES[mistake]
    spoil(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        load_model(tmp_path)
    assert "\n" not in str(error.value)


def test_folder_that_does_not_exist_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no model"):
        load_model(tmp_path / "nowhere")


def test_loading_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small_model().save_pretrained(tmp_path)
    capfd.readouterr()
    load_model(tmp_path)
    assert capfd.readouterr() == ("", "")
