"""output_attentions=True: how much of each key every query reads, for every mechanism, batch, padding and cache."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.model.models import SIZES, VARIANTS, mechanisms, random_tokens, small_model
from varifocal.attention.weights import attention_weights
from varifocal.model import VarifocalForCausalLM

FORGOTTEN = {"infini": 10, "infini delta": 8}
"""Of 11 tokens, those that are in a matrix and no keys any more: they have no weight of their own."""

every_variant = pytest.mark.parametrize("variant", VARIANTS)


def layer_inputs(model: VarifocalForCausalLM, tokens: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """x, q and k of every layer."""
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    hooks = [one.register_forward_pre_hook(lambda _, given: seen.append(given[:3])) for one in mechanisms(model)]
    with torch.no_grad():
        model(tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


@every_variant
def test_weights_are_those_of_every_layer(variant: str) -> None:
    model, tokens = small_model(variant), random_tokens(2, 13)
    with torch.no_grad():
        found = model(tokens, output_attentions=True).attentions
    assert [tuple(one.shape) for one in found] == [(2, 4, 13, 13)] * 2
    for row in range(2):
        inputs = layer_inputs(model, tokens[row : row + 1])
        for weights, mechanism, (x, q, k) in zip(found, mechanisms(model), inputs, strict=True):
            torch.testing.assert_close(weights[row], attention_weights(mechanism, x, q, k).mixed, rtol=1e-4, atol=1e-5)


@every_variant
def test_weights_of_cached_tokens_are_the_last_rows_of_all(variant: str) -> None:
    model, tokens = small_model(variant), random_tokens(2, 13)
    with torch.no_grad():
        whole = model(tokens, output_attentions=True, use_cache=False).attentions
        cache = model(tokens[:, :11], use_cache=True).past_key_values
        found = model(tokens[:, 11:], past_key_values=cache, output_attentions=True).attentions
    for one, other in zip(found, whole, strict=True):
        first = FORGOTTEN.get(variant, 0)
        torch.testing.assert_close(one[..., first:], other[:, :, 11:, first:], rtol=1e-4, atol=1e-5)
        assert not bool(one[..., :first].any())


def test_dense_weights_equal_those_of_qwen3() -> None:
    torch.manual_seed(3)
    theirs = Qwen3ForCausalLM(Qwen3Config(**SIZES, attn_implementation="eager")).eval()
    ours, tokens = small_model(), random_tokens(2, 13)
    ours.load_state_dict(theirs.state_dict())
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad():
        wanted = theirs(tokens, attention_mask=mask, position_ids=positions, output_attentions=True).attentions
        found = ours(tokens, attention_mask=mask, position_ids=positions, output_attentions=True).attentions
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one[0, :, 4:], other[0, :, 4:], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one[1], other[1], rtol=1e-4, atol=1e-5)
        # Padding reads nothing here.
        assert not one[0, :, :4].any()


def test_cost_of_weights_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model, tokens = small_model(), random_tokens(1, 13)
    from varifocal.model import modeling

    modeling.logger.warning_once.cache_clear()
    logging.getLogger("transformers").propagate = True
    modeling.logger.propagate = True
    with torch.no_grad(), caplog.at_level("WARNING"):
        for _ in range(2):
            model(tokens, output_attentions=True)
    assert sum("attending once more for every 8 keys (2 times for 13)" in one for one in caplog.messages) == 1
