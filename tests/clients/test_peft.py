"""peft: adapters on every linear layer, the gates' and widths' included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.models import random_tokens, small_model

MECHANISMS = ["head_gated", "context_adaptive", "dynamic_sparse", "sparse_geometric"]


def adapted(variant: str, **options: Any) -> Any:
    """A small model with LoRA on its linear layers, whose adapters change something from the start."""
    from peft import LoraConfig, get_peft_model

    settings: dict[str, Any] = {"r": 2, "target_modules": "all-linear", "init_lora_weights": False}
    return get_peft_model(small_model(variant, tie_word_embeddings=False), LoraConfig(**(settings | options)))


def loss_of(model: Any, tokens: Tensor) -> Any:
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


@pytest.mark.client("peft")
@pytest.mark.parametrize("variant", MECHANISMS)
def test_every_adapter_of_all_linear_learns(variant: str) -> None:
    """LoRA on `all-linear`: every adapter gets a gradient, gates and widths included"""
    model, tokens = adapted(variant), random_tokens(2, 24)
    model.train()
    loss_of(model, tokens).backward()
    adapters = {name: one for name, one in model.named_parameters() if "lora_" in name}
    gates = [name for name in adapters if ".mechanism." in name]
    expected = {"head_gated": 1, "context_adaptive": 3}.get(variant, 0)
    assert len(gates) == 2 * 2 * expected
    assert len(adapters) == 2 * 2 * (7 + expected)
    assert [name for name, one in adapters.items() if one.grad is None or not one.grad.any()] == []


@pytest.mark.client("peft")
@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_the_loss_sees_an_adapter_on_the_head_or_the_embedding(target: str) -> None:
    """LoRA on the head or the embedding: the loss is that of the logits, and the adapter learns"""
    model, tokens = adapted("head_gated", target_modules=[target]), random_tokens(2, 24)
    loss = loss_of(model, tokens)
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    assert all(bool(one.grad.any()) for name, one in model.named_parameters() if "lora_" in name)


@pytest.mark.client("peft")
def test_merged_adapters_compute_the_same_and_are_saved(tmp_path: Path) -> None:
    """`save_pretrained`, `PeftModel.from_pretrained` and `merge_and_unload` give the same logits"""
    from peft import PeftModel

    model, tokens = adapted("context_adaptive").eval(), random_tokens(2, 24)
    with torch.no_grad():
        expected = model(tokens).logits
        model.save_pretrained(tmp_path)
        loaded = PeftModel.from_pretrained(small_model("context_adaptive", tie_word_embeddings=False), tmp_path).eval()
        torch.testing.assert_close(loaded(tokens).logits, expected)
        merged = loaded.merge_and_unload()
        torch.testing.assert_close(merged(tokens).logits, expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(small_model("context_adaptive", tie_word_embeddings=False)(tokens).logits, expected)


@pytest.mark.client("peft")
def test_dropout_and_checkpointing_train_the_same_adapters() -> None:
    """LoRA with dropout under gradient checkpointing: the gradients are those of a run that keeps everything"""
    tokens, gradients = random_tokens(2, 24), []
    for checkpointing in (False, True):
        model = adapted("head_gated", lora_dropout=0.4)
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.train()
        torch.manual_seed(11)
        loss_of(model, tokens).backward()
        gradients.append({name: one.grad for name, one in model.named_parameters() if "lora_" in name})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.client("peft")
def test_an_adapted_model_decodes_as_it_reads() -> None:
    """`generate` with adapters: each new token is the best one of a pass over the whole text"""
    model, prompt = adapted("context_adaptive").eval(), random_tokens(1, 9)
    written = model.generate(input_ids=prompt, max_new_tokens=8, do_sample=False)
    with torch.no_grad():
        best = model(input_ids=written, use_cache=False).logits.argmax(dim=-1)
    assert torch.equal(written[:, 9:], best[:, 8:-1])
