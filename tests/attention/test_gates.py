"""Gates: what each kind and each stability tool does, and the numbers that watch over them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.attention.mechanisms import SHAPE, small_mechanism, tokens
from varifocal import GateConfig, make_mechanism
from varifocal.attention.gate_metrics import gate_gradient_norms, gate_statistics
from varifocal.attention.gates import Gate, normalize_gradient, set_gate_warmth

WIDTH, HEADS = 10, 4
LEARNED_KINDS = ["mlp", "linear", "static"]
KINDS = [*LEARNED_KINDS, "constant"]


def new_gate(**options: Any) -> Gate:
    return Gate(GateConfig(**options), model_width=WIDTH, heads=HEADS)


def trained_gate(*, spread: float = 1.0, **options: Any) -> Gate:
    """A gate with random parameters, as if it had been trained."""
    gate = new_gate(**options)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return gate


def gate_of(mechanism: nn.Module) -> Gate:
    gate = mechanism.gate
    assert isinstance(gate, Gate)
    return gate


def gradient_of(parameter: Tensor | None) -> Tensor:
    assert parameter is not None
    assert parameter.grad is not None
    return parameter.grad


def layer_input(*, batch: int = 2, length: int = 7, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(9))
    return x.to(dtype)


# Kinds and their start.


@pytest.mark.parametrize("kind", KINDS)
def test_gate_has_one_value_for_each_head_and_token(kind: str) -> None:
    assert new_gate(kind=kind)(layer_input()).value.shape == (2, HEADS, 7)


@pytest.mark.parametrize("kind", KINDS)
def test_gate_starts_at_exactly_one_half(kind: str) -> None:
    assert bool((new_gate(kind=kind)(layer_input()).value == 0.5).all())


@pytest.mark.parametrize("kind", KINDS)
def test_gate_starts_where_it_is_told(kind: str) -> None:
    value = new_gate(kind=kind, start=-2.0)(layer_input()).value
    torch.testing.assert_close(value, torch.full_like(value, 1 / (1 + math.exp(2))))


@pytest.mark.parametrize("kind", LEARNED_KINDS)
def test_gate_gets_a_gradient_at_its_start(kind: str) -> None:
    gate = new_gate(kind=kind)
    gate(layer_input()).value.square().sum().backward()
    last = gate.static if gate.output is None else gate.output.weight
    assert bool((gradient_of(last) != 0).all())


def test_linear_gate_is_the_sigmoid_of_a_linear_map() -> None:
    gate, x = trained_gate(kind="linear"), layer_input()
    assert gate.output is not None
    torch.testing.assert_close(gate(x).value, gate.output(x).sigmoid().mT)


def test_mlp_gate_is_the_sigmoid_of_two_layers() -> None:
    gate, x = trained_gate(kind="mlp", hidden=5), layer_input()
    assert gate.output is not None
    assert gate.hidden is not None
    wanted = gate.output(nn.functional.gelu(gate.hidden(x))).sigmoid().mT
    torch.testing.assert_close(gate(x).value, wanted)


def test_static_gate_is_the_same_for_all_tokens_and_differs_between_heads() -> None:
    value = trained_gate(kind="static")(layer_input()).value
    # Not bit by bit: torch's sigmoid rounds the last few of a row, which fill no vector register, in another way.
    torch.testing.assert_close(value, value[:1, :, :1].expand_as(value))
    assert value[0, :, 0].unique().numel() == HEADS


def test_constant_gate_has_nothing_to_learn() -> None:
    assert list(new_gate(kind="constant").parameters()) == []


@pytest.mark.parametrize("kind", LEARNED_KINDS)
def test_reset_returns_a_trained_gate_to_its_start(kind: str) -> None:
    gate = trained_gate(kind=kind)
    gate.warmth.fill_(0.3)
    gate.reset_parameters()
    assert gate.warmth == 1
    assert bool((gate(layer_input()).value == 0.5).all())


# float32 inside.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gate_is_float32_for_narrow_inputs(kind: str, dtype: torch.dtype) -> None:
    assert trained_gate(kind=kind).to(dtype)(layer_input(dtype=dtype)).value.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_gate_is_float64_for_float64(kind: str) -> None:
    assert trained_gate(kind=kind).double()(layer_input(dtype=torch.float64)).value.dtype == torch.float64


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_gate_computes_in_float32(kind: str) -> None:
    gate = trained_gate(kind=kind).bfloat16()
    x = layer_input(dtype=torch.bfloat16)
    value = gate(x).value
    wanted = trained_gate(kind=kind).bfloat16().float()(x.float()).value
    assert torch.equal(value, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_does_not_change_a_gate(kind: str) -> None:
    gate, x = trained_gate(kind=kind), layer_input()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = gate(x).value
    assert value.dtype == torch.float32
    assert torch.equal(value, gate(x).value)


# The stability tools.


@pytest.mark.parametrize("cap", [0.5, 3.0])
def test_soft_cap_bounds_the_gate(cap: float) -> None:
    value = trained_gate(spread=100.0, kind="linear", soft_cap=cap).double()(layer_input(dtype=torch.float64)).value
    highest = 1 / (1 + math.exp(-cap))
    # The cap is approached from inside; tanh may round to 1.
    assert value.max().item() <= highest + 1e-15
    assert value.min().item() >= 1 - highest - 1e-15
    assert value.max().item() > highest - 1e-6


def test_soft_cap_is_c_tanh_of_the_logit_over_c() -> None:
    x = layer_input(dtype=torch.float64)
    free = trained_gate(kind="linear").double()(x).value.logit()
    capped = trained_gate(kind="linear", soft_cap=1.5).double()(x).value.logit()
    torch.testing.assert_close(capped, 1.5 * torch.tanh(free / 1.5))


def test_there_is_no_z_loss_unless_asked_for() -> None:
    assert trained_gate(kind="linear")(layer_input()).losses == {}


@pytest.mark.parametrize("cap", [None, 0.5])
def test_z_loss_is_the_mean_squared_logit_before_the_cap(cap: float | None) -> None:
    x = layer_input(dtype=torch.float64)
    logits = trained_gate(kind="linear", start=0.3).double()(x).value.logit()
    losses = trained_gate(kind="linear", start=0.3, z_loss=0.1, soft_cap=cap).double()(x).losses
    assert losses.keys() == {"gate_z"}
    torch.testing.assert_close(losses["gate_z"], 0.1 * logits.square().mean())


def test_z_loss_counts_only_the_tokens_that_count() -> None:
    x = layer_input(dtype=torch.float64)
    counted = torch.tensor([[True] * 3 + [False] * 4, [False] * 7])
    logits = trained_gate(kind="linear").double()(x).value.logit()
    found = trained_gate(kind="linear", z_loss=0.1).double()(x, counted=counted).losses["gate_z"]
    torch.testing.assert_close(found, 0.1 * logits[0, :, :3].square().mean())


def test_z_loss_of_nothing_is_0() -> None:
    gate = trained_gate(kind="linear", z_loss=0.1)
    assert gate(layer_input(), counted=torch.zeros(2, 7, dtype=torch.bool)).losses["gate_z"] == 0


@pytest.mark.parametrize("name", ["head_gated", "context_adaptive"])
def test_z_loss_of_a_mechanism_does_not_depend_on_padding(name: str) -> None:
    mechanism = small_mechanism(name, gate={"z_loss": 0.5})
    text, documents = tokens(), torch.tensor([[-1] * 4 + [0] * 8] * 2)
    alone = mechanism(text.x[:, 4:], text.q[:, :, 4:], text.k[:, :, 4:], text.v[:, :, 4:])
    torch.testing.assert_close(mechanism(*text, documents=documents).losses["gate_z"], alone.losses["gate_z"])


def normalized_gradient(upstream: Tensor, target: float) -> Tensor:
    logits = torch.zeros_like(upstream, requires_grad=True)
    (gradient,) = torch.autograd.grad(normalize_gradient(logits, target), logits, upstream)
    return gradient


def test_gradient_normalization_leaves_the_logits_as_they_are() -> None:
    logits = torch.randn(2, HEADS, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(normalize_gradient(logits, 0.1), logits)


@pytest.mark.parametrize("size", [1e-20, 1e-6, 1.0, 1e6])
def test_gradient_normalization_gives_every_head_the_target_size(size: float) -> None:
    scale = torch.tensor([1.0, 5.0, 0.01, 1.0])[:, None] * size
    upstream = torch.randn(2, HEADS, 7, generator=torch.Generator().manual_seed(0)).double() * scale
    found = normalized_gradient(upstream, 0.25)
    sizes = found.square().mean(dim=(0, 2)).sqrt()
    torch.testing.assert_close(sizes, torch.full_like(sizes, 0.25))


def test_gradient_normalization_keeps_the_direction() -> None:
    upstream = torch.randn(2, HEADS, 7, generator=torch.Generator().manual_seed(0)).double()
    ratio = normalized_gradient(upstream, 0.25) / upstream
    torch.testing.assert_close(ratio, ratio[:1, :, :1].expand_as(ratio))
    assert bool((ratio > 0).all())


def test_gradient_normalization_measures_only_tokens_that_a_gradient_reaches() -> None:
    upstream = torch.randn(2, HEADS, 7, generator=torch.Generator().manual_seed(0)).double()
    padded = torch.cat((torch.zeros_like(upstream), upstream), dim=2)
    torch.testing.assert_close(normalized_gradient(padded, 0.25)[..., 7:], normalized_gradient(upstream, 0.25))


def test_gradient_normalization_leaves_the_gradient_of_the_z_loss_alone() -> None:
    x = layer_input()
    gradients = []
    for normalize in (None, 0.25):
        gate = trained_gate(kind="static", z_loss=0.1, normalize_gradient=normalize)
        gate(x).losses["gate_z"].backward()
        gradients.append(gradient_of(gate.static))
    assert torch.equal(gradients[0], gradients[1])


def test_gradient_normalization_leaves_a_head_without_gradient_at_0() -> None:
    upstream = torch.randn(2, HEADS, 7, generator=torch.Generator().manual_seed(0))
    upstream[:, 1] = 0.0
    found = normalized_gradient(upstream, 0.25)
    assert bool((found[:, 1] == 0).all())
    assert bool((found[:, 0] != 0).all())


def test_gradient_normalization_of_tiny_float32_gradients_stays_finite() -> None:
    # The square of 1e-30 is 0 in float32: such a gradient cannot be measured, but must not become NaN or infinite.
    upstream = torch.full((2, HEADS, 7), 1e-30)
    assert bool(normalized_gradient(upstream, 0.25).isfinite().all())


def test_gradient_normalization_reaches_the_parameters_of_a_mechanism() -> None:
    text = tokens()
    gradients = []
    for scale in (1.0, 1000.0):
        mechanism = small_mechanism("head_gated", gate={"kind": "static", "normalize_gradient": 0.25})
        (mechanism(*text).output.square().sum() * scale).backward()
        gradients.append(gradient_of(gate_of(mechanism).static))
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("kind", LEARNED_KINDS)
def test_gate_without_warmth_is_fixed_at_its_start(kind: str) -> None:
    gate = trained_gate(kind=kind, start=0.5)
    set_gate_warmth(gate, 0.0)
    value = gate(layer_input()).value
    torch.testing.assert_close(value, torch.full_like(value, 1 / (1 + math.exp(-0.5))))


@pytest.mark.parametrize("kind", LEARNED_KINDS)
@pytest.mark.parametrize("normalize", [None, 0.25])
def test_gate_without_warmth_gets_no_gradient(kind: str, normalize: float | None) -> None:
    gate = trained_gate(kind=kind, normalize_gradient=normalize)
    set_gate_warmth(gate, 0.0)
    gate(layer_input()).value.square().sum().backward()
    for parameter in gate.parameters():
        assert parameter.grad is None or bool((parameter.grad == 0).all())


def test_half_warm_gate_follows_half_of_its_logit() -> None:
    x = layer_input(dtype=torch.float64)
    gate = trained_gate(kind="linear").double()
    logits = gate(x).value.logit()
    set_gate_warmth(gate, 0.5)
    torch.testing.assert_close(gate(x).value.logit(), 0.5 * logits)


def test_warmth_reaches_every_gate_of_a_model() -> None:
    model = nn.ModuleList([small_mechanism("head_gated"), small_mechanism("context_adaptive"), nn.Linear(2, 2)])
    set_gate_warmth(model, 0.25)
    warmths = [gate.warmth.item() for gate in model.modules() if isinstance(gate, Gate)]
    assert warmths == [0.25, 0.25]


def test_warmth_is_saved_with_a_model() -> None:
    gate = new_gate()
    set_gate_warmth(gate, 0.25)
    assert gate.state_dict()["warmth"] == 0.25


# What is watched.


def test_statistics_of_known_gates() -> None:
    gates = torch.tensor([[[0.5, 0.5, 0.5, 0.5], [0.0, 1.0, 0.0, 1.0], [0.04, 0.06, 0.94, 0.96]]])
    found = gate_statistics(gates)
    torch.testing.assert_close(found.mean, torch.tensor([0.5, 0.5, 0.5]).double())
    spread = math.sqrt((0.46**2 + 0.44**2) / 2)
    torch.testing.assert_close(found.deviation, torch.tensor([0.0, 0.5, spread]).double())
    assert found.saturated.tolist() == [0.0, 1.0, 0.5]
    assert found.entropy[:2].tolist() == [1.0, 0.0]
    assert found.tokens.tolist() == [4, 4, 4]


def test_entropy_is_measured_in_bits() -> None:
    entropy = gate_statistics(torch.full((1, 1, 3), 0.25, dtype=torch.float64)).entropy.item()
    assert entropy == pytest.approx(0.25 * 2 + 0.75 * math.log2(4 / 3))


def test_margin_says_what_counts_as_saturated() -> None:
    gates = torch.tensor([[[0.04, 0.2, 0.8, 0.5]]])
    assert gate_statistics(gates, margin=0.25).saturated.item() == 0.75


@pytest.mark.parametrize("per_head", [False, True])
def test_tokens_whose_gate_decides_nothing_are_left_out(per_head: bool) -> None:
    gates = torch.tensor([[[0.0, 0.0, 0.5, 0.5]]])
    decides = torch.tensor([[False, False, True, True]])
    found = gate_statistics(gates, decides[:, None] if per_head else decides)
    assert (found.mean.item(), found.saturated.item(), found.tokens.item()) == (0.5, 0.0, 2)


def test_statistics_of_no_tokens_are_not_numbers() -> None:
    found = gate_statistics(torch.zeros(1, 2, 3), torch.zeros(1, 3, dtype=torch.bool))
    assert found.tokens.tolist() == [0, 0]
    assert bool(found.mean.isnan().all())


@pytest.mark.parametrize("kind", LEARNED_KINDS)
def test_gradient_norms_are_those_of_each_head_in_the_last_layer(kind: str) -> None:
    mechanism = small_mechanism("head_gated", gate={"kind": kind})
    mechanism(*tokens()).output.square().sum().backward()
    gate = gate_of(mechanism)
    if gate.output is None:
        wanted = gradient_of(gate.static).abs()
    else:
        parts = gradient_of(gate.output.weight), gradient_of(gate.output.bias)[:, None]
        wanted = torch.cat(parts, dim=1).norm(dim=1)
    found = gate_gradient_norms(mechanism)
    assert found.keys() == {"gate"}
    torch.testing.assert_close(found["gate"], wanted)


def test_gradient_norms_name_the_gates_of_a_model() -> None:
    model = nn.ModuleList(
        [small_mechanism("head_gated"), small_mechanism("dense"), small_mechanism("context_adaptive")]
    )
    for mechanism in model:
        mechanism(*tokens()).output.square().sum().backward()
    assert gate_gradient_norms(model).keys() == {"0.gate", "2.gate"}


def test_there_are_no_gradient_norms_before_the_first_backward_pass() -> None:
    assert gate_gradient_norms(small_mechanism("head_gated")) == {}


# Where a gate decides.

DOCUMENTS = torch.tensor([[0] * 12, [-1] * 2 + [0] * 6 + [1] * 4])


def gate_gradient(name: str, options: dict[str, Any], documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradient of the output with respect to each token's gate; and where the mechanism says it decides."""
    mechanism = small_mechanism(name, gate={"kind": "linear"}, **options)
    gates: list[Tensor] = []

    def keep(module: nn.Module, given: Any, gated: Any) -> None:
        gated.value.retain_grad()
        gates.append(gated.value)

    gate_of(mechanism).register_forward_hook(keep)
    answer = mechanism(*tokens(), documents=documents)
    upstream = torch.randn(answer.output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    (answer.output * upstream).sum().backward()
    gradient = gates[0].grad
    assert gradient is not None
    decides = answer.records["decides"]
    return gradient, (decides if decides.ndim == 3 else decides[:, None]).expand_as(gradient)


GATED = [
    ("head_gated", {}),
    ("head_gated", {"window": 1}),
    ("head_gated", {"window": 12}),
    ("context_adaptive", {}),
    ("context_adaptive", {"window_min": 6, "window_max": 9}),
    ("context_adaptive", {"window_min": 6, "window_max": 9, "width": "fixed", "k_min": 3}),
    ("context_adaptive", {"window_min": 7, "window_max": 9, "select": "blocks", "block": 2}),
    ("context_adaptive", {"window_min": 14, "window_max": 16, "k_min": 12}),
]
gated = pytest.mark.parametrize(("name", "options"), GATED, ids=str)
layouts = pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one document", "packed and padded"])


@gated
@layouts
def test_gate_that_decides_nothing_gets_a_gradient_of_exactly_0(
    name: str, options: dict[str, Any], documents: Tensor | None
) -> None:
    gradient, decides = gate_gradient(name, options, documents)
    assert bool((gradient[~decides] == 0).all())


@gated
@layouts
def test_gate_that_decides_gets_a_gradient(name: str, options: dict[str, Any], documents: Tensor | None) -> None:
    gradient, decides = gate_gradient(name, options, documents)
    assert bool((gradient[decides] != 0).all())


def test_a_window_as_long_as_the_text_leaves_the_gate_nothing_to_decide() -> None:
    assert not bool(small_mechanism("head_gated", window=12)(*tokens()).records["decides"].any())


def test_padding_decides_nothing() -> None:
    for name in ("head_gated", "context_adaptive"):
        decides = small_mechanism(name)(*tokens(), documents=DOCUMENTS).records["decides"]
        padded = DOCUMENTS < 0 if decides.ndim == 2 else (DOCUMENTS < 0)[:, None].expand_as(decides)
        assert not bool(decides[padded].any())


@pytest.mark.parametrize("name", ["head_gated", "context_adaptive"])
def test_recorded_gates_are_those_that_were_used_and_carry_no_graph(name: str) -> None:
    mechanism, text = small_mechanism(name), tokens()
    recorded = mechanism(*text).records["gate"]
    assert not recorded.requires_grad
    assert torch.equal(recorded, gate_of(mechanism)(text.x).value)


def test_papers_gates_are_the_defaults() -> None:
    assert make_mechanism("head_gated", SHAPE).config.gate == GateConfig(kind="linear")
    assert make_mechanism("context_adaptive", SHAPE).config.gate == GateConfig(kind="mlp")
