"""Weights held as int8: what they stand for, in every path, saved and loaded again."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from tests.model.models import small_config
from tests.model.test_decoding import decoder_of, general_path
from varifocal.attention.mechanisms.registry import MECHANISMS, mechanism_type
from varifocal.cli.main import app
from varifocal.model import VarifocalConfig, VarifocalForCausalLM, load_model
from varifocal.model.narrow import WIDENED_AT_A_TIME, NarrowLinear, narrowed, widened
from varifocal.model.weights import weight_bytes, with_weights
from varifocal.retrofit import load_pretrained

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
}  # fmt: skip
CUTS = (20, 21, 22, 26, 40)


def make_model(mechanism: str = "dense", **changes: Any) -> VarifocalForCausalLM:
    torch.manual_seed(0)
    options = dict(next((one.options for one in mechanism_type(mechanism).variants), {}))
    config = VarifocalConfig(**(SIZES | {"mechanism": mechanism, "mechanism_options": options} | changes))
    made: VarifocalForCausalLM = VarifocalForCausalLM(config).eval()
    return made


def tokens(count: int = 40) -> Tensor:
    return torch.randint(0, 97, (1, count), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def call_by_call(model: VarifocalForCausalLM, ids: Tensor) -> Tensor:
    """The logits of a prefill and of the tokens after it, one or some at a time."""
    answer = model(ids[:, : CUTS[0]], use_cache=True)
    found = [answer.logits]
    for begin, end in pairwise(CUTS):
        found.append(model(ids[:, begin:end], past_key_values=answer.past_key_values, use_cache=True).logits)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("group", [16, 32])
def test_a_weight_moves_by_half_a_scale_at_most(group: int) -> None:
    weight = torch.randn(50, 96)
    weight[3], weight[4, :group] = 0, 1e-30
    values, scales = narrowed(weight, group)
    moved = (widened(values, scales) - weight).abs().view(50, -1, group)
    assert values.dtype == torch.int8
    assert (moved <= 0.5001 * scales[..., None]).all()
    assert torch.equal(widened(values, scales)[3], torch.zeros(96))


def test_what_was_narrow_before_comes_back_bit_by_bit() -> None:
    values, scales = narrowed(torch.randn(200, 96), 32)
    # GGUF keeps its scales in 16 bits.
    scales = scales.half().float()
    again, found = narrowed(widened(values, scales), 32)
    assert torch.equal(again, values)
    torch.testing.assert_close(found, scales, rtol=3e-7, atol=0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 40])
def test_few_rows_many_rows_and_gradients_give_the_same_product(rows: int, bias: bool) -> None:
    columns = 64
    outputs = WIDENED_AT_A_TIME // columns + 5 if rows == 40 else 33
    layer = NarrowLinear(columns, outputs, bias=bias, group=32).eval()
    values, scales = narrowed(torch.randn(outputs, columns), 32)
    layer.load_state_dict({"weight": values, "scales": scales} | ({"bias": torch.randn(outputs)} if bias else {}))
    x = torch.randn(2, rows, columns)[:1].requires_grad_()
    wide = widened(values, scales)
    truth = x.detach().double() @ wide.double().mT + (layer.bias.double() if layer.bias is not None else 0)
    allowed = 1e-6 * (x.detach().abs() @ wide.abs().mT + 1)
    with torch.no_grad():
        assert ((layer(x) - truth).abs() <= allowed).all()
    found = layer(x)
    assert ((found.detach() - truth).abs() <= allowed).all()
    found.sum().backward()
    torch.testing.assert_close(x.grad, wide.sum(dim=0).expand_as(x), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("mechanism", [*MECHANISMS])
def test_every_mechanism_gives_the_logits_of_the_numbers_that_the_bytes_stand_for(mechanism: str) -> None:
    narrow = with_weights(make_model(mechanism), "int8")
    wide = with_weights(narrow, "float32")
    torch.testing.assert_close(call_by_call(narrow, tokens()), call_by_call(wide, tokens()), rtol=1e-4, atol=2e-5)
    assert decoder_of(narrow) is not None


@pytest.mark.parametrize(
    "changes", [{"tie_word_embeddings": False}, {"attention_bias": True}, {"qkv_bias": True, "qk_norm": False}]
)
def test_heads_and_biases_of_every_kind(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = with_weights(make_model("head_gated", **changes), "int8")
    wide = with_weights(narrow, "float32")
    expected = call_by_call(wide, tokens())
    torch.testing.assert_close(call_by_call(narrow, tokens()), expected, rtol=1e-4, atol=2e-5)
    with general_path(monkeypatch):
        torch.testing.assert_close(call_by_call(narrow, tokens()), expected, rtol=1e-4, atol=2e-5)
    labels = tokens()
    with torch.no_grad():
        torch.testing.assert_close(narrow(labels, labels=labels).loss, wide(labels, labels=labels).loss)


def test_memory_is_a_quarter_and_a_scale_for_each_group() -> None:
    model = make_model(hidden_size=256, intermediate_size=512, vocab_size=4000, tie_word_embeddings=True)
    narrow = with_weights(model, "int8")
    norms = sum(p.numel() * 4 for name, p in model.named_parameters() if "norm" in name)
    rotary = sum(b.numel() * 4 for b in model.buffers())
    products = weight_bytes(model) - norms - rotary
    assert weight_bytes(narrow) == products // 4 + products // 32 + norms + rotary
    assert narrow.lm_head.weight is narrow.model.embed_tokens.weight
    assert narrow.lm_head.scales is narrow.model.embed_tokens.scales


@pytest.mark.parametrize("tied", [True, False])
def test_saved_and_loaded_again_bit_by_bit(tied: bool, tmp_path: Path) -> None:
    model = make_model("head_gated", tie_word_embeddings=tied)
    narrow = with_weights(model, "int8")
    narrow.save_pretrained(tmp_path / "narrow")
    model.save_pretrained(tmp_path / "wide")
    assert json.loads((tmp_path / "narrow/config.json").read_text())["weights"] == {"kind": "int8", "group": 32}
    assert (tmp_path / "narrow/model.safetensors").stat().st_size < weight_bytes(model) / 3
    found = (
        load_model(tmp_path / "narrow"),
        load_model(tmp_path / "narrow", weights="int8"),
        load_model(tmp_path / "wide", weights="int8"),
    )
    for loaded in found:
        expected = narrow.state_dict()
        assert loaded.state_dict().keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    wide = load_model(tmp_path / "narrow", weights="float32")
    assert wide.config.weights is None
    head: Any = narrow.lm_head
    assert torch.equal(wide.lm_head.weight, widened(head.weight, head.scales))
    other = load_pretrained(tmp_path / "narrow", mechanism="local", mechanism_options={"window": 4})
    assert torch.equal(other.lm_head.weight, wide.lm_head.weight)


def test_generation_goes_on_as_with_the_same_numbers_in_float32() -> None:
    narrow = with_weights(make_model("local"), "int8")
    wide = with_weights(narrow, "float32")
    options: tuple[dict[str, Any], ...] = ({}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3})
    for one in options:
        found, expected = (
            model.generate(tokens(12), max_new_tokens=10, do_sample=False, pad_token_id=0, **one)
            for model in (narrow, wide)
        )
        assert torch.equal(found, expected)


GGUF_SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("family", "kind"), [("Llama", "Q8_0"), ("Llama", "Q4_0"), ("Qwen2", "Q4_0"), ("Qwen3", "Q8_0")]
)
def test_blocks_of_a_gguf_file_are_kept_as_they_are(family: str, kind: str, tmp_path: Path) -> None:
    import gguf

    from tests.retrofit.test_families import save_family, write_gguf

    theirs = save_family(family, tmp_path / "model", **GGUF_SIZES)
    write_gguf(theirs, tmp_path / "model.gguf", kind=gguf.GGMLQuantizationType[kind], head_dim=16)
    narrow = load_pretrained(tmp_path / "model.gguf", weights="int8", mechanism="local")
    wide = load_pretrained(tmp_path / "model.gguf", mechanism="local")
    expected = wide.state_dict()
    state = with_weights(narrow, "float32").state_dict()
    # Bit by bit: what is read narrowly stands for the very numbers that transformers reads.
    assert state.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in state.items())
    assert narrow.generation_config.to_dict() == wide.generation_config.to_dict()
    layer: Any = narrow.model.layers[0]
    values = layer.mlp.down_proj.weight
    assert (int(values.min()), int(values.max())) == ((-8, 7) if kind == "Q4_0" else (-127, 127))
    torch.testing.assert_close(call_by_call(narrow, tokens()), call_by_call(wide, tokens()), rtol=1e-4, atol=1e-4)
    narrow.save_pretrained(tmp_path / "ours")
    again = load_model(tmp_path / "ours").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in narrow.state_dict().items())


def test_other_kinds_of_a_gguf_file_are_rounded(tmp_path: Path) -> None:
    import gguf

    from tests.retrofit.test_families import save_family, write_gguf

    theirs = save_family("Llama", tmp_path / "model", **GGUF_SIZES)
    write_gguf(theirs, tmp_path / "model.gguf", kind=gguf.GGMLQuantizationType.Q4_1, head_dim=16)
    found = load_pretrained(tmp_path / "model.gguf", weights="int8").state_dict()
    expected = with_weights(load_pretrained(tmp_path / "model.gguf"), "int8").state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_reading_blocks_widens_no_more_than_a_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    from tests.retrofit.test_families import save_family, write_gguf
    from varifocal.retrofit import gguf_blocks

    theirs = save_family("Llama", tmp_path / "model", **GGUF_SIZES)
    write_gguf(theirs, tmp_path / "x.gguf", kind=gguf.GGMLQuantizationType.Q8_0, head_dim=16)
    widened_shapes: list[tuple[int, ...]] = []
    plain = gguf_blocks.numbers

    def numbers(tensor: Any) -> Tensor:
        widened_shapes.append(tuple(tensor.shape))
        return plain(tensor)

    monkeypatch.setattr(gguf_blocks, "numbers", numbers)
    load_pretrained(tmp_path / "x.gguf", weights="int8")
    assert widened_shapes
    assert all(len(shape) == 1 for shape in widened_shapes)


@pytest.mark.parametrize("keep", [0, 200, 20_000])
def test_a_broken_gguf_file_gets_one_sentence(keep: int, tmp_path: Path) -> None:
    import gguf

    from tests.retrofit.test_families import save_family, write_gguf

    theirs = save_family("Llama", tmp_path / "model", **GGUF_SIZES)
    kind = gguf.GGMLQuantizationType.Q8_0
    write_gguf(theirs, tmp_path / "x.gguf", kind=kind, head_dim=16)
    (tmp_path / "x.gguf").write_bytes((tmp_path / "x.gguf").read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"x\.gguf cannot be read"):
        load_pretrained(tmp_path / "x.gguf", weights="int8")
    write_gguf(theirs, tmp_path / "y.gguf", kind=kind, head_dim=16, without="model.norm.weight")
    with pytest.raises(ValueError, match=r"incomplete, these are missing: model\.norm\.weight$"):
        load_pretrained(tmp_path / "y.gguf", weights="int8")


def test_a_mistake_gets_one_sentence(tmp_path: Path) -> None:
    model = make_model()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="weights must be float32 or int8, got 'int4'"):
        load_model(tmp_path, weights="int4")
    with pytest.raises(ValueError, match=r"weights='int8' computes in float32, got dtype=torch\.bfloat16; leave"):
        load_model(tmp_path, weights="int8", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="between 16 weights or more, and this model has hidden_size 24"):
        with_weights(VarifocalForCausalLM(small_config()), "int8")
    with pytest.raises(ValueError, match=r"weights must be None or {'kind': 'int8', 'group': 16 or 32}, got {'kind'"):
        VarifocalConfig(**SIZES, weights={"kind": "int4", "group": 32})
    with pytest.raises(ValueError, match="groups of 32 need a hidden_size that is a multiple of it, got 48"):
        VarifocalConfig(**SIZES | {"hidden_size": 48}, weights={"kind": "int8", "group": 32})
    narrow = with_weights(model, "int8").train()
    with pytest.raises(ValueError, match="a model with int8 weights cannot be trained; load it with weights='float32'"):
        narrow(tokens(), labels=tokens())
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="hold NaN or infinity cannot be held as int8; use weights='float32'"):
        with_weights(model, "int8")


def test_the_command_says_what_it_was_given(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    answer = CliRunner().invoke(app, ["generate", str(tmp_path), "a", "--weights", "int4"])
    assert answer.exit_code != 0
    assert "weights must be float32 or int8" in f"{answer.output} {answer.exception}"
