"""torchao: weights in 8 bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.model.models import random_tokens, small_model


@pytest.mark.client("torchao")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["head_gated", "context_adaptive"])
def test_weights_in_eight_bits_serve_the_loss_and_decoding(variant: str, dtype: torch.dtype) -> None:
    """int8 weight-only on every linear layer: the loss of labels is that of the logits, near the full model's"""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model, tokens = small_model(variant, tie_word_embeddings=False).to(dtype), random_tokens(2, 24)
    with torch.no_grad():
        full = model(input_ids=tokens, labels=tokens).loss
        quantize_(model, Int8WeightOnlyConfig())
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        assert all(type(module.weight) is not nn.Parameter for module in linears)
        loss = model(input_ids=tokens, labels=tokens).loss
        logits = model(input_ids=tokens).logits.float()[:, :-1]
        expected = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        written = model.generate(input_ids=tokens[:1, :9], max_new_tokens=4, do_sample=False)
    torch.testing.assert_close(loss.float(), expected, rtol=1e-4, atol=1e-4)
    assert float(loss) == pytest.approx(float(full), rel=0.05)
    assert float(loss) != float(full)
    assert written.shape == (1, 13)
