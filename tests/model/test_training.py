"""Training: accumulation, auxiliary losses, checkpointing, compilation and narrow types."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from tests.model.models import VARIANTS, mechanisms, random_tokens, small_config, small_model
from varifocal import set_gate_warmth
from varifocal.model import VarifocalForCausalLM

every_variant = pytest.mark.parametrize("variant", VARIANTS)
Gradients = dict[str, Tensor]


def gradients(model: VarifocalForCausalLM) -> Gradients:
    """The gradients so far, which are then forgotten."""
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_same(found: Gradients, expected: Gradients, *, tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=tolerance, msg=name)


@every_variant
def test_accumulated_micro_batches_give_the_gradients_of_one_big_batch(variant: str) -> None:
    model, tokens = small_model(variant).train(), random_tokens(4, 16)
    model(tokens, labels=tokens).loss.backward()
    whole = gradients(model)
    for part in tokens[:2], tokens[2:]:
        model(part, labels=part, num_items_in_batch=torch.tensor(4 * 15)).loss.backward()
    assert_same(gradients(model), whole)


def test_accumulation_weighs_micro_batches_by_their_labels() -> None:
    model, tokens = small_model().train(), random_tokens(4, 16)
    labels = tokens.clone()
    labels[0, 3:] = -100
    model(tokens, labels=labels).loss.backward()
    whole = gradients(model)
    items = int((labels[:, 1:] != -100).sum())
    for rows in slice(0, 2), slice(2, 4):
        model(tokens[rows], labels=labels[rows], num_items_in_batch=items).loss.backward()
    assert_same(gradients(model), whole)


@every_variant
def test_gradient_checkpointing_gives_the_same_gradients(variant: str) -> None:
    model, tokens = small_model(variant).train(), random_tokens(2, 16)
    model(tokens, labels=tokens).loss.backward()
    plain = gradients(model)
    model.gradient_checkpointing_enable()
    model(tokens, labels=tokens).loss.backward()
    assert_same(gradients(model), plain)


def test_every_parameter_of_every_mechanism_gets_a_gradient() -> None:
    for variant in VARIANTS:
        model, tokens = small_model(variant).train(), random_tokens(2, 24)
        model(tokens, labels=tokens).loss.backward()
        without = [name for name, one in model.named_parameters() if one.grad is None or not one.grad.any()]
        assert without == [], variant


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_gets_one_dense_gradient_that_is_the_logits_own(tied: bool) -> None:
    model, tokens = small_model(tie_word_embeddings=tied).train(), random_tokens(2, 16)
    model(tokens, labels=tokens).loss.backward()
    found = gradients(model)
    assert all(one.layout == torch.strided for one in found.values())
    logits = model(tokens, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
    assert_same(found, gradients(model))


def test_reentrant_checkpointing_is_refused() -> None:
    with pytest.raises(ValueError, match="use_reentrant"):
        small_model().gradient_checkpointing_enable({"use_reentrant": True})


def test_checkpointed_training_fills_no_cache() -> None:
    model = small_model().train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="use_cache=False"):
        model(random_tokens(1, 4), past_key_values=DynamicCache())


def test_auxiliary_losses_are_in_the_loss_and_reported_apart() -> None:
    options = {"window": 5, "gate": {"z_loss": 0.1}}
    model = small_model(mechanism="head_gated", mechanism_options=options).train()
    tokens = random_tokens(2, 16)
    output = model(tokens, labels=tokens)
    assert output.auxiliary_losses["gate_z"] > 0
    torch.testing.assert_close(output.loss, output.cross_entropy + output.auxiliary_losses["gate_z"])


def test_evaluation_loss_is_the_cross_entropy_alone() -> None:
    options = {"window": 5, "gate": {"z_loss": 0.1}}
    model, tokens = small_model(mechanism="head_gated", mechanism_options=options), random_tokens(2, 16)
    output = model(tokens, labels=tokens)
    assert output.auxiliary_losses["gate_z"] > 0
    assert output.loss == output.cross_entropy


def test_indexer_learns_from_its_divergence() -> None:
    model, tokens = small_model("dynamic_sparse").train(), random_tokens(2, 24)
    output = model(tokens, labels=tokens)
    assert set(output.auxiliary_losses) == {"indexer"}
    output.loss.backward()
    assert mechanisms(model)[0].key_weight.grad.abs().sum() > 0


def test_records_are_given_for_each_layer_when_asked_for() -> None:
    model, tokens = small_model("context_adaptive"), random_tokens(2, 16)
    output = model(tokens, output_records=True)
    assert [set(one) for one in output.records] == [{"width", "gate", "decides", "selected"}] * 2
    assert output.records[0]["gate"].shape == (2, 4, 16)
    assert model(tokens).records is None


def test_hidden_states_are_given_when_asked_for() -> None:
    model, tokens = small_model(), random_tokens(2, 16)
    output = model.model(tokens, output_hidden_states=True)
    assert len(output.hidden_states) == 3
    assert output.hidden_states[-1] is output.last_hidden_state


def test_gates_held_at_their_start_give_the_fixed_mix() -> None:
    learned, constant = (
        small_model(mechanism="head_gated", mechanism_options={"window": 5, "gate": {"kind": kind}})
        for kind in ("linear", "constant")
    )
    constant.load_state_dict(learned.state_dict(), strict=False)
    set_gate_warmth(learned, 0.0)
    tokens = random_tokens(2, 16)
    with torch.no_grad():
        torch.testing.assert_close(learned(tokens).logits, constant(tokens).logits)


def test_model_learns_a_text_by_heart() -> None:
    torch.manual_seed(0)
    model = VarifocalForCausalLM(small_config("context_adaptive", initializer_range=0.1)).train()
    tokens = random_tokens(2, 24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("variant", ["head_gated", "context_adaptive"])
def test_compiled_forward_equals_eager(variant: str) -> None:
    model, tokens = small_model(variant), random_tokens(2, 16)
    compiled = torch.compile(model.model, backend="aot_eager")
    with torch.no_grad():
        expected = model.model(tokens, use_cache=False).last_hidden_state
        found = compiled(tokens, use_cache=False).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attention_mask": torch.tensor([[1, 2, 2, 2]])}, "0 and 1 only"),
        ({"attention_mask": torch.ones(1, 4, 4)}, r"got shape \(1, 4, 4\)"),
        ({"attention_mask": torch.ones(1, 3)}, "0 cached tokens and 4 new ones"),
        ({"documents": torch.zeros(1, 4)}, "must be integers"),
        ({"documents": torch.zeros(1, 5, dtype=torch.int64)}, r"\(1, 4\), .* got shape \(1, 5\)"),
        ({"documents": torch.tensor([[0, 1, 0, 0]])}, "two separate places"),
        (
            {"documents": torch.zeros(1, 4, dtype=torch.int64), "attention_mask": torch.ones(1, 4)},
            "not both",
        ),
        ({"position_ids": torch.zeros(4, dtype=torch.int64)}, r"\[B, T\] = \(1, 4\)"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1]]), "use_cache": True}, "use_cache=False, or documents"),
        ({"inputs_embeds": torch.zeros(1, 4, 24)}, "either input_ids or inputs_embeds"),
    ],
)
def test_bad_call_is_explained(given: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_model()(random_tokens(1, 4), **given)


def test_full_cache_and_use_cache_false_contradict_each_other() -> None:
    model, tokens = small_model(), random_tokens(1, 4)
    cache = model(tokens, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="leave one of them out"):
        model(tokens, past_key_values=cache, use_cache=False)


BFLOAT16 = """
import torch
from tests.model.models import VARIANTS, mechanisms, random_tokens, small_model
torch.set_num_threads(1)
for variant in VARIANTS:
    tokens = random_tokens(2, 16)
    wide, narrow = small_model(variant).train(), small_model(variant).bfloat16().train()
    expected, found = wide(tokens, labels=tokens), narrow(tokens, labels=tokens)
    found.loss.backward()
    assert all(p.grad.isfinite().all() for p in narrow.parameters()), variant
    assert abs(found.cross_entropy - expected.cross_entropy) < 0.1 * expected.cross_entropy, variant
    narrow.eval()
    with torch.no_grad():
        full = narrow(tokens, use_cache=False).logits
        cache, steps = None, []
        for token in tokens.split(1, dim=1):
            step = narrow(token, past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            steps.append(step.logits)
    difference = (torch.cat(steps, dim=1) - full).float().abs().max()
    print(variant, "|", float(difference), float(full.abs().max()))
    with torch.autocast("cpu", torch.bfloat16):
        wide(tokens, labels=tokens).loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in wide.parameters()), variant
"""


def test_bfloat16_trains_and_decodes() -> None:
    """In a process of its own: without AMX, which the machine may announce and not run."""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    root = Path(__file__).parent.parent.parent
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", BFLOAT16], cwd=root, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-2000:]
