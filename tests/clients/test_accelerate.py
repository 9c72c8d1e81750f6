"""accelerate: prepared for training, and spread over devices with parts of it on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.models import VARIANTS, random_tokens, small_model


@pytest.mark.client("accelerate")
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name in ("head_gated", "dynamic_sparse", "combiner")])
def test_a_prepared_model_trains_as_an_unprepared_one(variant: str) -> None:
    """`Accelerator.prepare` and `accumulate`: the steps are those of a plain loop"""
    from accelerate import Accelerator

    weights: list[dict[str, Any]] = []
    for prepared in (False, True):
        model = small_model(variant).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [random_tokens(1, 16, seed=seed) for seed in range(4)]
        if prepared:
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            model, optimizer = accelerator.prepare(model, optimizer)
            for tokens in batches:
                with accelerator.accumulate(model):
                    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
                    optimizer.step()
                    optimizer.zero_grad()
            model = accelerator.unwrap_model(model)
        else:
            for first in (0, 2):
                for tokens in batches[first : first + 2]:
                    (model(input_ids=tokens, labels=tokens).loss / 2).backward()
                optimizer.step()
                optimizer.zero_grad()
        weights.append(model.state_dict())
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, msg=name)


@pytest.mark.client("accelerate")
@pytest.mark.parametrize("variant", ["head_gated", "context_adaptive blocks", "dynamic_sparse", "sparse_geometric"])
def test_a_model_with_layers_on_disk_computes_the_same(variant: str, tmp_path: Path) -> None:
    """`dispatch_model` with layers and the head on disk: logits, loss and generated tokens are the same"""
    from accelerate import dispatch_model

    tokens = random_tokens(2, 24)
    expected, model = small_model(variant, tie_word_embeddings=False), small_model(variant, tie_word_embeddings=False)
    places = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb"), "cpu")
    places |= {"model.layers.1": "disk", "lm_head": "disk"}
    dispatched = dispatch_model(model, device_map=places, main_device="cpu", offload_dir=tmp_path)
    assert dispatched.lm_head.weight.device.type == "meta"
    with torch.no_grad():
        for given in ({}, {"labels": tokens}):
            ours, theirs = (one(input_ids=tokens, **given) for one in (expected, dispatched))
            name = "loss" if given else "logits"
            torch.testing.assert_close(getattr(theirs, name), getattr(ours, name))
        written = [
            one.generate(input_ids=tokens[:, :9], max_new_tokens=6, do_sample=False) for one in (expected, dispatched)
        ]
    assert torch.equal(*written)


@pytest.mark.client("accelerate")
def test_empty_weights_take_a_checkpoint(tmp_path: Path) -> None:
    """`init_empty_weights` and `load_checkpoint_and_dispatch`: the saved model's logits"""
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    from varifocal.model import VarifocalForCausalLM

    model, tokens = small_model("context_adaptive", tie_word_embeddings=False), random_tokens(1, 9)
    model.save_pretrained(tmp_path)
    with init_empty_weights():
        empty = VarifocalForCausalLM(model.config)
    loaded = load_checkpoint_and_dispatch(empty, str(tmp_path), device_map={"": "cpu"}).eval()
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
