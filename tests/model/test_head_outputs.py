"""Changes to the outputs of heads: nothing at their start, the same while decoding, kept by a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.models import VOCABULARY, small_config
from varifocal.experiments.comparison import check_models
from varifocal.experiments.comparison_plan import Cell, load_plan
from varifocal.model import VarifocalConfig, VarifocalForCausalLM

BOTH: dict[str, Any] = {"output_gate": 12, "remove_own_value": True}


def made(**changes: Any) -> VarifocalForCausalLM:
    torch.manual_seed(3)
    model = VarifocalForCausalLM(small_config(**changes))
    model.eval()
    return model


def moved(**changes: Any) -> VarifocalForCausalLM:
    """A model whose changes are no longer at their start."""
    model = made(**changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".head_outputs." in name:
                parameter.add_(torch.randn_like(parameter))
    return model


def some_ids() -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(0))


def test_it_is_off_by_default() -> None:
    assert not any("head_outputs" in name for name, _ in made().named_parameters())


@torch.no_grad()
def test_it_changes_nothing_at_its_start() -> None:
    plain, changed = made(), made(**BOTH)
    missing, unexpected = changed.load_state_dict(plain.state_dict(), strict=False)
    assert {name.rpartition(".")[2] for name in missing} == {"gate_weight", "own_value"}
    assert unexpected == []
    torch.testing.assert_close(changed(some_ids()).logits, plain(some_ids()).logits)


@pytest.mark.parametrize("variant", ["dense", "local", "head_gated"])
@torch.no_grad()
def test_decoding_equals_reading_at_once(variant: str) -> None:
    model, ids = moved(variant=variant, **BOTH), some_ids()
    whole = model(ids).logits
    first = model(ids[:, :12], use_cache=True)
    parts, cache = [first.logits], first.past_key_values
    for place in range(12, ids.shape[1]):
        step = model(ids[:, place : place + 1], past_key_values=cache, use_cache=True)
        parts.append(step.logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-5, rtol=2e-5)
    # The change is there: without it other logits would come out.
    plain = made(variant=variant)
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if "head_outputs" not in name})
    assert (plain(ids).logits - whole).abs().max() > 1e-2


@torch.no_grad()
def test_equations_are_those_of_the_docstring() -> None:
    layer: Any = moved(**BOTH).model.layers[0]
    outputs = layer.self_attn.head_outputs
    x, v, y = torch.randn(1, 3, 24), torch.randn(1, 2, 3, 8), torch.randn(1, 4, 3, 8)
    found = outputs(x, v, y)
    for head in range(4):
        for token in range(3):
            own, before = v[0, head // 2, token], y[0, head, token]
            rest = before - torch.tanh(outputs.own_value[head]) * (before @ own) / (own @ own) * own
            gate = 2 * torch.sigmoid(outputs.gate_weight[head] @ x[0, token, :12])
            torch.testing.assert_close(found[0, head, token], gate * rest)


def test_both_learn() -> None:
    model, ids = made(**BOTH).train(), some_ids()
    model(ids, labels=ids).loss.backward()
    gradients = [one.grad for name, one in model.named_parameters() if "head_outputs" in name]
    assert len(gradients) == 4
    assert all(one is not None and one.abs().max() > 0 for one in gradients)


@torch.no_grad()
def test_checkpoint_keeps_them_and_one_without_them_starts_at_nothing(tmp_path: Path) -> None:
    model = moved(**BOTH)
    model.save_pretrained(tmp_path / "with")
    again = VarifocalForCausalLM.from_pretrained(tmp_path / "with").eval()
    torch.testing.assert_close(again(some_ids()).logits, model(some_ids()).logits)
    plain = made()
    plain.save_pretrained(tmp_path / "without")
    config = VarifocalConfig.from_pretrained(tmp_path / "without", **BOTH)
    started = VarifocalForCausalLM.from_pretrained(tmp_path / "without", config=config).eval()
    torch.testing.assert_close(started(some_ids()).logits, plain(some_ids()).logits)


def test_comparison_of_them_has_models_that_can_be_made() -> None:
    plan = load_plan(Path(__file__).parents[2] / "configs" / "cpu" / "output_changes.toml")
    check_models(plan)
    (arm,) = [arm for arm in plan.arms if arm.name == "dense_gate"]
    assert plan.config(Cell(arm=arm, seed=0)).model.overrides == {"output_gate": 12}


def test_options_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="output_gate must be between 0 and the hidden_size 24, got 25"):
        small_config(output_gate=25)


def test_engine_refuses_them() -> None:
    from varifocal.serving.head_plan import plan_heads

    with pytest.raises(ValueError, match="output_gate and remove_own_value are not"):
        plan_heads(small_config(output_gate=12))
