"""The model computes what transformers' Qwen3, Qwen2 and Llama compute from the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.model.models import SIZES, random_tokens, small_model
from varifocal.model import VarifocalForCausalLM

ALIKE = [
    ("Qwen3", Qwen3Config, Qwen3ForCausalLM, {}, {}),
    ("Qwen3 with biases", Qwen3Config, Qwen3ForCausalLM, {"attention_bias": True}, {"attention_bias": True}),
    ("Qwen3 untied", Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": False}, {"tie_word_embeddings": False}),
    ("Qwen2", Qwen2Config, Qwen2ForCausalLM, {}, {"qk_norm": False, "qkv_bias": True}),
    ("Llama", LlamaConfig, LlamaForCausalLM, {}, {"qk_norm": False, "rms_norm_eps": 1e-6}),
]
"""Name, config and model of transformers, its changes of SIZES, and ours."""

every_architecture = pytest.mark.parametrize("case", ALIKE, ids=lambda case: case[0])


def both(case: Any, **options: Any) -> tuple[Any, VarifocalForCausalLM]:
    """A model of transformers with random weights, and ours with the same ones."""
    _, config_type, model_type, their_changes, our_changes = case
    torch.manual_seed(3)
    theirs = model_type(config_type(**(SIZES | their_changes))).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    ours = small_model(**our_changes, **options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


@every_architecture
def test_dense_logits_equal_those_of_transformers(case: Any) -> None:
    theirs, ours = both(case)
    tokens = random_tokens(2, 24)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, rtol=1e-4, atol=1e-4)


@every_architecture
def test_dense_loss_and_gradients_equal_those_of_transformers(case: Any) -> None:
    theirs, ours = both(case)
    tokens = random_tokens(2, 24)
    labels = tokens.clone()
    labels[0, 4:9] = -100
    losses: list[Tensor] = []
    for model in (theirs, ours):
        loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
        loss.backward()
        losses.append(loss)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-4, msg=name)


def test_local_equals_the_sliding_window_layers_of_qwen3() -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
    case: Any = ("Qwen3 sliding", Qwen3Config, Qwen3ForCausalLM, sliding, {})
    theirs, ours = both(case, variant="local window")
    tokens = random_tokens(2, 24)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_local_does_not_equal_a_sliding_window_that_is_one_key_wider() -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}
    case: Any = ("Qwen3 sliding", Qwen3Config, Qwen3ForCausalLM, sliding, {})
    theirs, ours = both(case, variant="local window")
    tokens = random_tokens(2, 24)
    with torch.no_grad():
        assert (ours(tokens).logits - theirs(tokens).logits).abs().max() > 1e-2


def test_left_padded_logits_equal_those_of_qwen3() -> None:
    theirs, ours = both(ALIKE[0])
    tokens = random_tokens(2, 24)
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=mask, position_ids=positions).logits
        torch.testing.assert_close(
            ours(tokens, attention_mask=mask).logits[mask == 1], expected[mask == 1], rtol=1e-4, atol=1e-4
        )


def test_positions_that_restart_pack_documents_as_in_qwen3() -> None:
    theirs, ours = both(ALIKE[0])
    tokens = random_tokens(2, 24)
    positions = torch.cat((torch.arange(9), torch.arange(15))).expand(2, -1)
    with torch.no_grad():
        expected = theirs(tokens, position_ids=positions, use_cache=False).logits
        found = ours(tokens, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
