"""Classification of texts and tokens, and answers in texts: transformers' heads on our model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.utils import find_labels

from tests.model.models import random_tokens, small_config
from varifocal.model import (
    VarifocalForQuestionAnswering,
    VarifocalForSequenceClassification,
    VarifocalForTokenClassification,
)

HEADS: dict[str, Any] = {
    "sequence": (
        AutoModelForSequenceClassification,
        VarifocalForSequenceClassification,
        {"labels": torch.tensor([2, 0])},
        {"logits": (2, 3)},
    ),
    "token": (
        AutoModelForTokenClassification,
        VarifocalForTokenClassification,
        {"labels": random_tokens(2, 12) % 3},
        {"logits": (2, 12, 3)},
    ),
    "question": (
        AutoModelForQuestionAnswering,
        VarifocalForQuestionAnswering,
        {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])},
        {"start_logits": (2, 12), "end_logits": (2, 12)},
    ),
}
every_head = pytest.mark.parametrize("head", HEADS)
GATED: dict[str, Any] = {
    "mechanism_options": {"window": 5, "gate": {"z_loss": 0.1}},
    "num_labels": 3,
    "pad_token_id": 0,
}


@every_head
def test_heads_load_by_their_auto_class_and_learn(head: str, tmp_path: Path) -> None:
    auto, kind, labels, shapes = HEADS[head]
    torch.manual_seed(0)
    made = auto.from_config(small_config("head_gated", **GATED)).eval()
    assert type(made) is kind
    tokens = random_tokens(2, 12)
    with torch.no_grad():
        expected = made(tokens, **labels)
    for name, shape in shapes.items():
        assert getattr(expected, name).shape == shape
    made.save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path)
    with torch.no_grad():
        assert loaded(tokens, **labels).loss == expected.loss
    loaded.train()(tokens, **labels).loss.backward()
    assert all(one.grad is not None and one.grad.any() for one in loaded.parameters())


@every_head
def test_training_adds_the_auxiliary_losses(head: str) -> None:
    _, kind, labels, _ = HEADS[head]
    torch.manual_seed(0)
    model = kind(small_config("head_gated", classifier_dropout=0.0, **GATED))
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "mechanism" in name:
                one.add_(torch.randn_like(one))
        tokens = random_tokens(2, 12)
        auxiliary = model.base_model(tokens).auxiliary_losses["gate_z"]
        difference = model.train()(tokens, **labels).loss - model.eval()(tokens, **labels).loss
    assert auxiliary > 0
    torch.testing.assert_close(difference, auxiliary, rtol=1e-3, atol=1e-5)


@every_head
def test_trainer_finds_the_labels_of_a_head(head: str) -> None:
    _, kind, labels, _ = HEADS[head]
    assert find_labels(kind) == list(labels)


def test_padding_changes_no_class() -> None:
    torch.manual_seed(0)
    model = VarifocalForSequenceClassification(small_config("head_gated", **GATED)).eval()
    tokens = random_tokens(1, 8).clamp(min=1)
    padded = torch.nn.functional.pad(tokens, (0, 4))
    with torch.no_grad():
        wanted = model(tokens).logits
        for given in (padded, padded.roll(4, dims=1)):
            found = model(given, attention_mask=(given != 0).long()).logits
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
