"""torch.export: a program of torch's own operators alone, for texts of any length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.model.models import random_tokens, small_model

SHAPES = [(2, 24), (1, 5), (3, 41)]
EXPORTED = ["context_adaptive", "context_adaptive window", "combiner"]
"""Those that rank keys, forget keys and pool keys; tests of ONNX export all."""


class Logits(nn.Module):
    """Tokens [B, T] and their mask, if there is padding, to logits [B, T, V]."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.model = small_model(variant, num_hidden_layers=1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return logits


def masked(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and a mask that takes the first three of the first row for padding."""
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    return tokens, mask


def export(model: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    """The program of a model whose inputs are [B, T], for every B and T."""
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with torch.no_grad():
        return torch.export.export(model, inputs, dynamic_shapes=(free,) * len(inputs))


@pytest.mark.client("torch")
@pytest.mark.parametrize("variant", EXPORTED)
def test_an_exported_program_reads_texts_of_any_length(variant: str) -> None:
    """`torch.export` with a dynamic batch and length: the same logits, from torch's own operators alone"""
    model = Logits(variant)
    program = export(model, (random_tokens(*SHAPES[0]),))
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [name for name in called if name.startswith("varifocal")]
    run = program.module()
    with torch.no_grad():
        for batch, length in SHAPES:
            tokens = random_tokens(batch, length, seed=length)
            torch.testing.assert_close(run(tokens), model(tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.client("torch")
def test_an_exported_program_leaves_padding_out() -> None:
    """`torch.export` with an attention mask: the same logits beside padding"""
    model = Logits("dynamic_sparse blocks")
    run = export(model, masked(random_tokens(*SHAPES[0]))).module()
    with torch.no_grad():
        for batch, length in SHAPES:
            tokens, mask = masked(random_tokens(batch, length, seed=length))
            expected = model(tokens, mask)[mask == 1]
            torch.testing.assert_close(run(tokens, mask)[mask == 1], expected, rtol=1e-4, atol=1e-4)
