"""Decoding from a static cache in compiled code: one graph for all tokens, and what uncompiled code gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CompileConfig, StaticCache

from tests.model.models import VARIANTS, mechanisms, random_tokens, small_model
from varifocal.model.memory_layer import can_be_compiled, keep_all_tokens

COMPILED = ("head_gated", "context_adaptive", "local window", "focused")


def compiled_options() -> dict[str, Any]:
    """Options of generate that compile every step but the first, refuse more than one graph, and run it as it is."""
    config = CompileConfig(fullgraph=True, dynamic=False, backend="eager", mode=None)
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config}


@pytest.mark.parametrize("variant", COMPILED)
def test_compiled_decoding_gives_the_same_tokens_by_one_graph(variant: str) -> None:
    torch._dynamo.reset()
    model, prompt = small_model(variant), random_tokens(2, 9)
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    mask[1, 4:6] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, attention_mask=mask, **options)
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = model.generate(prompt, attention_mask=mask, **options, **compiled_options())
    assert hasattr(model, "_compiled_call")
    assert torch.equal(found, expected)
    torch._dynamo.reset()


def test_uncompiled_calls_go_on_from_what_compiled_ones_added() -> None:
    torch._dynamo.reset()
    model, tokens = small_model("head_gated"), random_tokens(2, 16)
    cache = StaticCache(config=model.config, max_cache_len=20)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        wanted = model(tokens, use_cache=False).logits
        found = [model(tokens[:, :6], past_key_values=cache).logits]
        found += [compiled(tokens[:, one : one + 1], past_key_values=cache).logits for one in range(6, 10)]
        assert cache.get_seq_length() == 10
        cache.crop(-2)
        order = torch.tensor([1, 0])
        cache.reorder_cache(order)
        found = [torch.cat(found, dim=1)[:, :8]]
        found += [compiled(tokens[order, one : one + 1], past_key_values=cache).logits[order] for one in range(8, 12)]
        found.append(model(tokens[order, 12:], past_key_values=cache).logits[order])
    torch.testing.assert_close(torch.cat(found, dim=1), wanted, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()


def test_mechanisms_that_remember_more_decode_uncompiled() -> None:
    not_compiled = {name for name in VARIANTS if not can_be_compiled(mechanisms(small_model(name))[0])}
    needs_more = {"combiner", "dynamic_sparse", "dynamic_sparse blocks", "routing", "sparse_geometric"}
    assert not_compiled == needs_more | {"dynamic_sparse input", "infini", "infini delta"}
    model, prompt = small_model("combiner"), random_tokens(1, 9)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options, **compiled_options())
    assert torch.equal(found, expected)
    assert not hasattr(model, "_compiled_call")


def test_static_cache_keeps_what_windows_forget_only_for_compiled_code() -> None:
    torch._dynamo.reset()
    model, tokens = small_model("focused"), random_tokens(1, 48)
    cache = StaticCache(config=model.config, max_cache_len=64)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        model(tokens[:, :40], past_key_values=cache)
        assert not keep_all_tokens(cache)
        with pytest.raises(Exception, match="needs a cache that keeps every token, and this one forgets some"):
            compiled(tokens[:, 40:41], past_key_values=cache)
        less = cache.layers[0].bytes
        cache.reset()
        assert keep_all_tokens(cache)
        model(tokens[:, :40], past_key_values=cache)
        found = [compiled(tokens[:, one : one + 1], past_key_values=cache).logits for one in range(40, 48)]
        wanted = model(tokens, use_cache=False).logits[:, 40:]
    assert cache.layers[0].bytes > less
    torch.testing.assert_close(torch.cat(found, dim=1), wanted, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()
