"""generate, with every mechanism, cache and way of choosing: as without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.models import VARIANTS, random_tokens, small_model
from varifocal.model import VarifocalForCausalLM

NEW = 12
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def generate(model: VarifocalForCausalLM, prompt: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(5)
    mask = options.pop("attention_mask", torch.ones_like(prompt))
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
    found: Tensor = model.generate(prompt, attention_mask=mask, **options)
    return found


def greedy_by_full_forwards(model: VarifocalForCausalLM, prompt: Tensor) -> Tensor:
    tokens = prompt
    with torch.no_grad():
        for _ in range(NEW):
            best = model(tokens, use_cache=False).logits[:, -1].argmax(dim=-1, keepdim=True)
            tokens = torch.cat((tokens, best), dim=1)
    return tokens


@every_variant
def test_greedy_generation_takes_the_best_of_full_forwards(variant: str) -> None:
    model, prompt = small_model(variant), random_tokens(2, 9)
    assert torch.equal(generate(model, prompt), greedy_by_full_forwards(model, prompt))


@every_variant
def test_static_cache_generates_the_same(variant: str) -> None:
    model, prompt = small_model(variant), random_tokens(2, 9)
    found = generate(model, prompt, cache_implementation="static")
    assert torch.equal(found, greedy_by_full_forwards(model, prompt))


@every_variant
def test_chunked_prefill_generates_the_same(variant: str) -> None:
    model, prompt = small_model(variant), random_tokens(2, 9)
    found = generate(model, prompt, prefill_chunk_size=4)
    assert torch.equal(found, greedy_by_full_forwards(model, prompt))


@every_variant
def test_left_padded_rows_generate_as_if_alone(variant: str) -> None:
    model, prompt = small_model(variant), random_tokens(2, 9)
    mask = torch.ones_like(prompt)
    mask[0, :4] = 0
    found = generate(model, prompt, attention_mask=mask)
    assert torch.equal(found[1:], generate(model, prompt[1:]))
    assert torch.equal(found[:1, 4:], generate(model, prompt[:1, 4:]))


@every_variant
def test_beams_with_a_cache_equal_beams_without(variant: str) -> None:
    model, prompt = small_model(variant), random_tokens(2, 9)
    options = {"num_beams": 3, "length_penalty": 0.7}
    assert torch.equal(generate(model, prompt, **options), generate(model, prompt, use_cache=False, **options))


@every_variant
def test_samples_with_a_cache_equal_samples_without(variant: str) -> None:
    model, prompt = small_model(variant), random_tokens(2, 9)
    options = {"do_sample": True, "temperature": 0.8, "top_p": 0.9}
    assert torch.equal(generate(model, prompt, **options), generate(model, prompt, use_cache=False, **options))


@pytest.mark.parametrize("variant", ["focused", "focused windows"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 7},
        {"num_beams": 3},
        {"do_sample": True},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": "of another seed"},
    ],
    ids=str,
)
def test_prompts_far_longer_than_a_window_are_continued_as_without_a_cache(
    variant: str, options: dict[str, Any]
) -> None:
    model, prompt = small_model(variant), random_tokens(1, 37)
    if "assistant_model" in options:
        options = {"assistant_model": small_model(variant, seed=3)}
    chosen = {name: value for name, value in options.items() if name in ("num_beams", "do_sample")}
    wanted = generate(model, prompt, use_cache=False, **chosen)
    assert torch.equal(generate(model, prompt, **options), wanted)


def test_beams_over_a_sliding_static_cache_equal_beams_without_cache() -> None:
    model, prompt = small_model("local window"), random_tokens(2, 9)
    found = generate(model, prompt, num_beams=3, cache_implementation="static")
    assert torch.equal(found, generate(model, prompt, num_beams=3, use_cache=False))


def test_generation_goes_on_from_a_given_cache() -> None:
    model, prompt = small_model("dynamic_sparse"), random_tokens(1, 9)
    with torch.no_grad():
        cache = model(prompt[:, :6], use_cache=True).past_key_values
    assert torch.equal(generate(model, prompt, past_key_values=cache), generate(model, prompt))
