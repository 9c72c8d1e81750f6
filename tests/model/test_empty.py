"""An empty batch and an empty text go through the model."""

from __future__ import annotations

import pytest
import torch

from tests.model.models import VARIANTS, VOCABULARY, random_tokens, small_model


@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0), (0, 0)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_goes_through_the_model(variant: str, batch: int, length: int) -> None:
    model = small_model(variant)
    tokens = random_tokens(batch, length)
    for given in ({}, {"attention_mask": torch.ones_like(tokens)}, {"documents": torch.zeros_like(tokens)}):
        assert model(tokens, **given).logits.shape == (batch, length, VOCABULARY)
    model.train()
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    assert loss.item() == 0.0


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_more_can_follow_a_text(variant: str) -> None:
    model = small_model(variant)
    tokens = random_tokens(2, 7)
    with torch.no_grad():
        first = model(tokens[:, :6], use_cache=True)
        nothing = model(tokens[:, :0], past_key_values=first.past_key_values)
        assert nothing.logits.shape == (2, 0, VOCABULARY)
        last = model(tokens[:, 6:], past_key_values=nothing.past_key_values).logits
        torch.testing.assert_close(last[:, 0], model(tokens).logits[:, -1], rtol=1e-4, atol=1e-4)
