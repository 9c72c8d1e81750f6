"""Decoding in one native call a layer: the same numbers as the general path, which is the law."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from varifocal.attention.forced_gates import force_gates
from varifocal.attention.gates import set_gate_warmth
from varifocal.attention.mechanisms.base import Step
from varifocal.attention.mechanisms.dense import Dense
from varifocal.attention.mechanisms.registry import MECHANISMS, mechanism_type
from varifocal.model import VarifocalConfig, VarifocalForCausalLM, decoding, head, modeling

LENGTH = 40
CUTS = (20, 21, 22, 24, 28, 29, 32, 33, LENGTH)
"""Where a text is cut into calls: after a prefill single tokens, and some together."""


def make_model(mechanism: str, options: dict[str, Any] | None = None, **config: Any) -> VarifocalForCausalLM:
    torch.manual_seed(0)
    if options is None:
        options = dict(next((one.options for one in mechanism_type(mechanism).variants), {}))
    sizes = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    all_options = {"mechanism": mechanism, "mechanism_options": options, **config}
    made: VarifocalForCausalLM = VarifocalForCausalLM(VarifocalConfig(**sizes, **heads, **all_options)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return made


@contextmanager
def general_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(modeling, "find_decoder", lambda *_: None)
        patch.setattr(head, "MOST_TOKENS", 0)
        yield


@torch.no_grad()
def decoded(model: VarifocalForCausalLM, ids: Tensor, mask: Tensor, cuts: tuple[int, ...] = CUTS) -> Tensor:
    """The logits after the first cut, call by call."""
    cache = model(ids[:, : cuts[0]], attention_mask=mask[:, : cuts[0]], use_cache=True).past_key_values
    found = []
    for begin, end in pairwise(cuts):
        found.append(
            model(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True).logits
        )
    return torch.cat(found, dim=1)


def text(batch: int = 1, padding: int = 0) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 97, (batch, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(batch, LENGTH, dtype=torch.long)
    mask[-1, :padding] = 0
    return ids, mask


def decoder_of(model: VarifocalForCausalLM) -> decoding.Decoder | None:
    return decoding._DECODERS.made.get(model.model)


@pytest.mark.parametrize("mechanism", [*MECHANISMS])
def test_every_mechanism_decodes_as_on_the_general_path(mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(mechanism)
    for batch, padding in ((1, 0), (2, 7)):
        ids, mask = text(batch, padding)
        with general_path(monkeypatch):
            expected = decoded(model, ids, mask)
        assert decoder_of(model) is None or batch > 1
        torch.testing.assert_close(decoded(model, ids, mask), expected, rtol=1e-4, atol=2e-5)
    assert decoder_of(model) is not None


@pytest.mark.parametrize(
    ("mechanism", "options", "config"),
    [
        ("dense", {}, {"qk_norm": False}),
        ("dense", {}, {"attention_bias": True}),
        ("dense", {}, {"qkv_bias": True, "qk_norm": False}),
        ("local", {"window": 7, "sinks": 0}, {}),
        ("local", {"window": 7, "sinks": 3}, {}),
        ("head_gated", {"window": 7, "sinks": 3}, {}),
        ("local", {"window": 7, "sinks": 0, "sink_logit": True}, {}),
        ("focused", {}, {}),
        ("focused", {"windows": (None, 7), "sinks": 3, "sink_logit": True}, {}),
        ("focused", {"windows": (None, 7), "sinks": 3}, {}),
        ("focused", {"windows": (5, 9), "sinks": 0}, {}),
        ("focused", {"windows": (6,), "sinks": 2}, {}),
        ("head_gated", {"window": 7, "gate": {"kind": "linear", "start": -0.5, "soft_cap": 2.0}}, {}),
        ("head_gated", {"window": 7, "gate": {"kind": "static"}}, {}),
        ("head_gated", {"window": 7, "gate": {"kind": "constant"}}, {}),
    ],
)
def test_one_call_is_a_whole_layer(
    mechanism: str, options: dict[str, Any], config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(mechanism, options, **config)
    ids, mask = text(2, 5)
    with general_path(monkeypatch):
        expected = decoded(model, ids, mask)
    torch.testing.assert_close(decoded(model, ids, mask), expected, rtol=1e-4, atol=2e-5)
    found = decoder_of(model)
    assert found is not None
    assert all(layer.steps for layer in found.layers)


def test_a_gate_with_a_hidden_layer_runs_between_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("head_gated", {"window": 7, "gate": {"kind": "mlp", "hidden": 8}})
    ids, mask = text()
    with general_path(monkeypatch):
        expected = decoded(model, ids, mask)
    torch.testing.assert_close(decoded(model, ids, mask), expected, rtol=1e-4, atol=2e-5)
    found = decoder_of(model)
    assert found is not None
    assert not any(layer.steps for layer in found.layers)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    model, (ids, mask), before = make_model("head_gated"), text(2), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(decoded(model, ids, mask, (39, LENGTH)))
            torch.set_num_threads(1)
    finally:
        torch.set_num_threads(before)
    # The prefill of all three may differ between threads in torch's products, the decoded token's own steps may not.
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[2], found[0], rtol=1e-5, atol=1e-6)


def test_what_is_attached_or_changed_later_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("head_gated", {"window": 7})
    ids, mask = text()
    plain = decoded(model, ids, mask)
    layer: Any = model.model.layers[1]

    def expected() -> Tensor:
        with general_path(monkeypatch):
            return decoded(model, ids, mask)

    with force_gates(model, 1.0):
        assert not torch.allclose(decoded(model, ids, mask), plain, atol=1e-3)
        torch.testing.assert_close(decoded(model, ids, mask), expected(), rtol=1e-4, atol=2e-5)
    set_gate_warmth(model, 0.0)
    torch.testing.assert_close(decoded(model, ids, mask), expected(), rtol=1e-4, atol=2e-5)
    set_gate_warmth(model, 1.0)
    handle = layer.mlp.down_proj.register_forward_hook(lambda module, given, made: made * 2)
    torch.testing.assert_close(decoded(model, ids, mask), expected(), rtol=1e-4, atol=2e-5)
    handle.remove()
    layer.self_attn.q_proj.weight.data = torch.randn_like(layer.self_attn.q_proj.weight)
    torch.testing.assert_close(decoded(model, ids, mask), expected(), rtol=1e-4, atol=2e-5)
    with torch.no_grad():
        layer.mlp.up_proj.weight.mul_(1.5)
    torch.testing.assert_close(decoded(model, ids, mask), expected(), rtol=1e-4, atol=2e-5)
    layer.mlp.up_proj = torch.nn.Sequential(layer.mlp.up_proj, torch.nn.Tanh())
    torch.testing.assert_close(decoded(model, ids, mask), expected(), rtol=1e-4, atol=2e-5)


def test_a_class_that_changes_the_equation_alone_does_not_inherit_the_step() -> None:
    class Other(Dense):
        def equation(self, call: Any) -> Any:
            raise NotImplementedError

    class Both(Other):
        def step(self) -> Step | None:
            return None

    assert decoding.speaks_for_its_equation(Dense)
    assert not decoding.speaks_for_its_equation(Other)
    assert decoding.speaks_for_its_equation(Both)


@pytest.mark.parametrize("mechanism", ["dense", "local", "head_gated", "focused"])
def test_tokens_can_be_taken_back_and_beams_reordered(mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(mechanism)
    ids = torch.randint(0, 97, (1, 20), generator=torch.Generator().manual_seed(2))
    for options in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"do_sample": False}):
        with general_path(monkeypatch):
            expected = model.generate(ids, max_new_tokens=12, pad_token_id=0, **options)
        assert torch.equal(model.generate(ids, max_new_tokens=12, pad_token_id=0, **options), expected)


def test_gradients_and_wider_types_go_the_general_way() -> None:
    model = make_model("dense")
    ids, _ = text()
    cache = model(ids[:, :20], use_cache=True).past_key_values
    logits = model(ids[:, 20:21], past_key_values=cache).logits
    assert logits.requires_grad
    assert decoder_of(model) is None
    wide = make_model("dense").double()
    decoded(wide, *text())
    assert decoder_of(wide) is None
