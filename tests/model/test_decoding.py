"""However a text is fed to the model, every token gets the logits of one full forward pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache

from tests.model.models import VARIANTS, random_tokens, small_model
from varifocal.model import VarifocalForCausalLM

LENGTH = 24
every_variant = pytest.mark.parametrize("variant", VARIANTS)

CACHES: dict[str, Callable[[VarifocalForCausalLM], Cache]] = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "dynamic without config": lambda model: DynamicCache(),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=LENGTH + 7),
}
every_cache = pytest.mark.parametrize("cache", CACHES)


def full_logits(model: VarifocalForCausalLM, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(tokens, use_cache=False).logits
    return logits


def cached_logits(model: VarifocalForCausalLM, tokens: Tensor, chunks: list[int], cache: Cache) -> Tensor:
    """The logits of tokens that arrive in chunks of the given lengths."""
    found = []
    with torch.no_grad():
        for chunk in torch.split(tokens, chunks, dim=1):
            found.append(model(chunk, past_key_values=cache).logits)
    return torch.cat(found, dim=1)


def assert_equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@every_variant
@every_cache
def test_token_by_token_equals_the_full_forward(variant: str, cache: str) -> None:
    model, tokens = small_model(variant), random_tokens(2, LENGTH)
    found = cached_logits(model, tokens, [1] * LENGTH, CACHES[cache](model))
    assert_equal(found, full_logits(model, tokens))


@every_variant
@every_cache
def test_chunked_prefill_equals_the_full_forward(variant: str, cache: str) -> None:
    model, tokens = small_model(variant), random_tokens(2, LENGTH)
    found = cached_logits(model, tokens, [3, 9, 1, 1, 7, 2, 1], CACHES[cache](model))
    assert_equal(found, full_logits(model, tokens))


@every_variant
def test_left_padding_changes_nothing(variant: str) -> None:
    model, tokens = small_model(variant), random_tokens(2, LENGTH)
    padding = 5
    padded = torch.cat((random_tokens(2, padding, seed=9), tokens), dim=1)
    mask = torch.ones_like(padded)
    mask[:, :padding] = 0
    with torch.no_grad():
        found = model(padded, attention_mask=mask, use_cache=False).logits[:, padding:]
    assert_equal(found, full_logits(model, tokens))


@every_variant
def test_right_padding_changes_nothing(variant: str) -> None:
    model, tokens = small_model(variant), random_tokens(2, LENGTH)
    padded = torch.cat((tokens, random_tokens(2, 5, seed=9)), dim=1)
    mask = torch.ones_like(padded)
    mask[:, LENGTH:] = 0
    with torch.no_grad():
        found = model(padded, attention_mask=mask, use_cache=False).logits[:, :LENGTH]
    assert_equal(found, full_logits(model, tokens))


@every_variant
@every_cache
def test_left_padded_rows_decode_as_if_alone(variant: str, cache: str) -> None:
    model, tokens = small_model(variant), random_tokens(2, LENGTH)
    short = LENGTH - 6
    padded = tokens.clone()
    padded[0] = torch.cat((random_tokens(1, 6, seed=9)[0], tokens[0, :short]))
    mask = torch.ones_like(tokens)
    mask[0, :6] = 0
    past, found = CACHES[cache](model), []
    with torch.no_grad():
        for begin, end in ((0, 9), (9, 10), (10, 17), *((one, one + 1) for one in range(17, LENGTH))):
            step = model(padded[:, begin:end], attention_mask=mask[:, :end], past_key_values=past)
            found.append(step.logits)
    logits = torch.cat(found, dim=1)
    assert_equal(logits[1:], full_logits(model, tokens[1:]))
    assert_equal(logits[:1, 6:], full_logits(model, tokens[:1, :short]))


@every_variant
def test_packed_documents_do_not_see_each_other(variant: str) -> None:
    model, first, second = small_model(variant), random_tokens(2, 10), random_tokens(2, 14, seed=2)
    documents = torch.tensor([0] * 10 + [1] * 14).expand(2, -1)
    with torch.no_grad():
        found = model(torch.cat((first, second), dim=1), documents=documents, use_cache=False).logits
    assert_equal(found[:, :10], full_logits(model, first))
    assert_equal(found[:, 10:], full_logits(model, second))


@every_variant
def test_packed_documents_decode_from_a_cache(variant: str) -> None:
    model, first, second = small_model(variant), random_tokens(2, 10), random_tokens(2, 14, seed=2)
    tokens = torch.cat((first, second), dim=1)
    documents = torch.tensor([0] * 10 + [1] * 14).expand(2, -1)
    past, found = DynamicCache(config=model.config), []
    with torch.no_grad():
        for begin, end in ((0, 12), *((one, one + 1) for one in range(12, LENGTH))):
            step = model(tokens[:, begin:end], documents=documents[:, :end], past_key_values=past)
            found.append(step.logits)
    assert_equal(torch.cat(found, dim=1)[:, 10:], full_logits(model, second))


@every_variant
def test_future_token_changes_nothing_before_it(variant: str) -> None:
    model, tokens = small_model(variant), random_tokens(2, LENGTH)
    changed = tokens.clone()
    changed[:, 15:] = (changed[:, 15:] + 1) % 61
    assert torch.equal(full_logits(model, tokens)[:, :15], full_logits(model, changed)[:, :15])


@every_variant
def test_cropped_cache_goes_on_as_if_the_tokens_had_not_been(variant: str) -> None:
    model, tokens = small_model(variant), random_tokens(2, LENGTH)
    cache = DynamicCache()
    with torch.no_grad():
        model(tokens[:, :16], past_key_values=cache)
        cache.activate_past_recording()
        model(random_tokens(2, 3, seed=9), past_key_values=cache)
        cache.crop(-3)
        found = model(tokens[:, 16:], past_key_values=cache).logits
    assert_equal(found, full_logits(model, tokens)[:, 16:])


@every_variant
def test_reordered_cache_goes_on_with_the_other_rows(variant: str) -> None:
    model, tokens = small_model(variant), random_tokens(3, LENGTH)
    order = torch.tensor([2, 0, 0])
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens[:, :16], past_key_values=cache)
        cache.reorder_cache(order)
        found = model(tokens[order, 16:], past_key_values=cache).logits
    assert_equal(found, full_logits(model, tokens[order])[:, 16:])


@pytest.mark.parametrize(("variant", "kept"), [("local window", 5), ("context_adaptive window", 11)])
def test_layer_that_looks_back_a_window_keeps_no_more(variant: str, kept: int) -> None:
    model, tokens = small_model(variant), random_tokens(2, LENGTH)
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=40)):
        cached_logits(model, tokens, [8, *[1] * 16], cache)
        assert {layer.keys.shape[2] for layer in cache.layers} <= {kept - 1, kept}


def test_hybrid_keeps_a_window_in_one_layer_and_all_in_the_other() -> None:
    options = {"local": {"window": 5, "global_tokens": 0}}
    model = small_model(mechanism=["local", "dense"], mechanism_options=options)
    tokens, cache = random_tokens(2, LENGTH), DynamicCache(config=model.config)
    found = cached_logits(model, tokens, [8, *[1] * 16], cache)
    assert_equal(found, full_logits(model, tokens))
    assert [layer.keys.shape[2] for layer in cache.layers] == [4, LENGTH]


def test_training_fills_no_cache_unless_asked() -> None:
    model, tokens = small_model(), random_tokens(1, 6)
    assert model(tokens).past_key_values is not None
    assert model(tokens, labels=tokens).past_key_values is None
    model.train()
    assert model(tokens).past_key_values is None
    assert model(tokens, use_cache=True).past_key_values is not None
