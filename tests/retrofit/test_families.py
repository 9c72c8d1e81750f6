"""Checkpoints of Qwen3, Qwen2 and Llama, from safetensors and GGUF, become models of ours; bad ones a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.model.models import SIZES, random_tokens, small_model
from varifocal.model import VarifocalForCausalLM, load_model
from varifocal.retrofit import load_pretrained

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LARGE_BASE = {"rope_type": "default", "rope_theta": 1e6}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}

FAMILIES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "Qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "Qwen3, large base": (Qwen3Config, Qwen3ForCausalLM, {"rope_parameters": LARGE_BASE}),
    "Qwen3, biases": (Qwen3Config, Qwen3ForCausalLM, {"attention_bias": True}),
    "Qwen3, untied": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": False}),
    "Qwen3, half sliding": (Qwen3Config, Qwen3ForCausalLM, SLIDING),
    "Qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "Qwen2, half sliding": (Qwen2Config, Qwen2ForCausalLM, SLIDING),
    "Qwen2, narrow heads": (Qwen2Config, Qwen2ForCausalLM, {"head_dim": None}),
    "Llama": (LlamaConfig, LlamaForCausalLM, {"rms_norm_eps": 1e-4}),
    "Llama, biases": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True}),
    "Llama 3": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3}),
}  # fmt: skip
"""By name: config and model of transformers, and changes of SIZES."""


def save_family(name: str, folder: Path, **more: Any) -> Any:
    """A random model of a family, saved."""
    config_type, model_type, changes = FAMILIES[name]
    changes = {key: value for key, value in changes.items() if value is not None}
    sizes = {key: value for key, value in SIZES.items() if key not in FAMILIES[name][2] or key in changes}
    torch.manual_seed(5)
    model = model_type(config_type(**(sizes | changes | more))).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias") or "norm" in key:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.save_pretrained(folder)
    return model


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save_family("Llama", tmp_path / "llama")
    return tmp_path / "llama"


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(random_tokens(2, 24), use_cache=False).logits
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_dense_logits_equal_those_of_the_saved_model(name: str, tmp_path: Path) -> None:
    theirs = save_family(name, tmp_path / "model")
    ours = load_pretrained(tmp_path / "model")
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-4, atol=1e-4)


def test_llama_3_scaling_changes_the_logits(tmp_path: Path) -> None:
    save_family("Llama 3", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    scaled = logits(load_pretrained(tmp_path / "model"))
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    file.write_text(json.dumps(config))
    assert (logits(load_pretrained(tmp_path / "model")) - scaled).abs().max() > 1e-2


def test_taken_over_model_is_saved_and_loaded_as_ours(llama: Path, tmp_path: Path) -> None:
    ours = load_pretrained(llama, mechanism="head_gated", mechanism_options={"window": 5})
    ours.save_pretrained(tmp_path / "ours")
    assert torch.equal(logits(load_model(tmp_path / "ours")), logits(ours))


def test_model_of_ours_can_be_given_another_mechanism(tmp_path: Path) -> None:
    local = small_model("local window")
    local.save_pretrained(tmp_path / "local")
    dense = load_pretrained(tmp_path / "local")
    assert dense.config.mechanism == "dense"
    twin = small_model("dense")
    twin.load_state_dict(local.state_dict())
    assert torch.equal(logits(dense), logits(twin))


def test_weights_come_in_the_type_that_is_asked_for(llama: Path) -> None:
    assert load_pretrained(llama, dtype=torch.float64).dtype == torch.float64


def test_weights_keep_the_type_they_were_saved_in(llama: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float16).save_pretrained(tmp_path / "half")
    assert load_pretrained(tmp_path / "half").dtype == torch.float16


def test_training_the_new_model_leaves_the_old_one_alone() -> None:
    from varifocal.retrofit.families import take_over

    theirs = small_model()
    before = logits(theirs)
    ours = take_over(theirs)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(1.0)
    assert torch.equal(logits(theirs), before)


GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of a projection in the order in which GGUF keeps those of Llama: the two halves of a head take turns."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)  # type: ignore[no-untyped-call, no-any-return]


def write_gguf(model: Any, file: Path, **more: Any) -> None:
    """A model of transformers as GGUF, its matrices in float32 or as blocks of a kind."""
    config, width = model.config, more.get("head_dim", SIZES["head_dim"])
    architecture = config.model_type
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("small")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(width)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if more.get("scaled"):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    if "header" in more:
        more["header"](writer)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" or name == more.get("without"):
            continue
        if architecture == "llama" and "q_proj" in name:
            value = interleaved(value, config.num_attention_heads)
        if architecture == "llama" and "k_proj" in name:
            value = interleaved(value, config.num_key_value_heads)
        for theirs, short in GGUF_NAMES.items():
            name = name.replace(theirs, short)
        numbers, kind = value.float().contiguous().numpy(), more.get("kind")
        if kind is not None and value.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", ["Qwen3", "Qwen2", "Llama"])
def test_gguf_gives_the_logits_of_the_model_it_was_made_from(name: str, tmp_path: Path) -> None:
    theirs = save_family(name, tmp_path / "model")
    write_gguf(theirs, tmp_path / "model.gguf")
    ours = load_pretrained(tmp_path / "model.gguf")
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-4, atol=1e-4)


def test_gguf_without_a_tensor_is_refused(tmp_path: Path) -> None:
    write_gguf(save_family("Llama", tmp_path / "model"), tmp_path / "x.gguf", without="model.norm.weight")
    with pytest.raises(ValueError, match=r"incomplete, these are missing: model\.norm\.weight$"):
        load_pretrained(tmp_path / "x.gguf")


def test_gguf_with_scaled_positions_is_refused(tmp_path: Path) -> None:
    write_gguf(save_family("Llama", tmp_path / "model"), tmp_path / "x.gguf", scaled=True)
    with pytest.raises(ValueError, match="scales its rotary positions"):
        load_pretrained(tmp_path / "x.gguf")


@pytest.mark.parametrize("keep", [0, 3, 200, 20_000])
def test_truncated_gguf_is_refused_in_a_sentence(keep: int, tmp_path: Path) -> None:
    write_gguf(save_family("Llama", tmp_path / "model"), tmp_path / "x.gguf")
    (tmp_path / "x.gguf").write_bytes((tmp_path / "x.gguf").read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"x\.gguf cannot be read"):
        load_pretrained(tmp_path / "x.gguf")


def test_unknown_architecture_is_named_with_those_that_are_known(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"unknown architecture 'gpt2'; known are qwen3, qwen2, llama, varifocal"):
        load_pretrained(tmp_path)


def test_missing_tensor_is_named(llama: Path) -> None:
    change_weights(llama, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"incomplete, these are missing: model\.layers\.1\.mlp\.up_proj\.weight$"):
        load_pretrained(llama)


def test_tensor_of_another_shape_is_named_with_both_shapes(llama: Path) -> None:
    change_weights(llama, lambda weights: weights.update({"model.norm.weight": torch.ones(7)}))
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \(7,\) and should have \(24,\)"):
        load_pretrained(llama)


def change_weights(folder: Path, change: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("keep", [0, 100, 5000])
def test_truncated_safetensors_are_refused_in_a_sentence(keep: int, llama: Path) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"the weights in .* cannot be read"):
        load_pretrained(llama)


def test_pickle_is_never_read(llama: Path) -> None:
    torch.save(load_file(llama / "model.safetensors"), llama / "pytorch_model.bin")
    (llama / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"only as pickle \(pytorch_model\.bin\).*convert them to safetensors first"):
        load_pretrained(llama)


def test_broken_config_is_refused_in_a_sentence(llama: Path) -> None:
    (llama / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"the config of .* cannot be read"):
        load_pretrained(llama)


def test_missing_source_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"does not exist; expected a folder with safetensors, a \.gguf file, owner/name"
    ):
        load_pretrained(tmp_path / "nowhere")


def test_unreachable_hub_is_said_to_be_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"nobody/nothing cannot be fetched from the hub: .*; give a folder") as caught:
        load_pretrained("nobody/nothing")
    assert "\n" not in str(caught.value)


def test_sliding_windows_are_not_replaced_silently(tmp_path: Path) -> None:
    save_family("Qwen3, half sliding", tmp_path)
    with pytest.raises(ValueError, match="trained with sliding windows"):
        load_pretrained(tmp_path, mechanism="head_gated")


def test_biases_of_the_feed_forward_are_refused(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**(SIZES | {"mlp_bias": True}))).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="mlp_bias=True cannot be loaded"):
        load_pretrained(tmp_path)


def test_result_is_a_model_of_ours_in_evaluation_mode(llama: Path) -> None:
    model = load_pretrained(llama)
    assert isinstance(model, VarifocalForCausalLM)
    assert not model.training
