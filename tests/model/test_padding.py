"""Padding anywhere in a row, with every mechanism and cache: as if it were not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, Qwen3Config, StaticCache

from tests.model.models import SIZES, VARIANTS, random_tokens, small_model
from varifocal.model import VarifocalForCausalLM

every_variant = pytest.mark.parametrize("variant", VARIANTS)
CACHES: dict[str, Any] = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "dynamic without config": lambda model: DynamicCache(),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=40),
}
every_cache = pytest.mark.parametrize("cache", CACHES)
MASK = torch.tensor(
    [
        [1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        [0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0],
    ]
)


def alone(model: VarifocalForCausalLM, tokens: Tensor) -> Tensor:
    """The logits [T, V] of one text [T]."""
    with torch.no_grad():
        logits: Tensor = model(tokens[None], use_cache=False).logits[0]
    return logits


def assert_rows_as_alone(model: VarifocalForCausalLM, tokens: Tensor, mask: Tensor, logits: Tensor) -> None:
    """The logits [B, T, V] of every row's text are those of the text alone."""
    for row, text, found in zip(tokens, mask.bool(), logits, strict=True):
        torch.testing.assert_close(found[text], alone(model, row[text]), rtol=1e-4, atol=1e-4)


@every_variant
def test_padding_anywhere_changes_nothing_in_one_pass(variant: str) -> None:
    model, tokens = small_model(variant), random_tokens(4, 12)
    with torch.no_grad():
        for use_cache in (False, True):
            found = model(tokens, attention_mask=MASK, use_cache=use_cache).logits
            assert_rows_as_alone(model, tokens, MASK, found)


@every_variant
@every_cache
def test_text_goes_on_after_a_prompt_with_padding_anywhere(variant: str, cache: str) -> None:
    model, tokens = small_model(variant), random_tokens(4, 22)
    mask = torch.cat((MASK, torch.ones(4, 10, dtype=torch.int64)), dim=1)
    past, found = CACHES[cache](model), []
    with torch.no_grad():
        for begin, end in ((0, 12), (12, 13), (13, 19), (19, 20), (20, 22)):
            found.append(
                model(tokens[:, begin:end], attention_mask=mask[:, :end], past_key_values=past).logits  # [B, T, V]
            )
    assert_rows_as_alone(model, tokens, mask, torch.cat(found, dim=1))


@every_variant
@every_cache
def test_padding_may_come_after_cached_text(variant: str, cache: str) -> None:
    model, tokens = small_model(variant), random_tokens(2, 16)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1, 0, 0] + [1] * 6])
    past, found = CACHES[cache](model), []
    with torch.no_grad():
        for begin, end in ((0, 6), (6, 10), (10, 11), (11, 16)):
            found.append(model(tokens[:, begin:end], attention_mask=mask[:, :end], past_key_values=past).logits)
    assert past.get_seq_length() == 16
    assert_rows_as_alone(model, tokens, mask, torch.cat(found, dim=1))


@every_cache
def test_tokens_of_a_padded_prompt_can_be_taken_back_where_rows_agree(cache: str) -> None:
    model, tokens = small_model("head_gated"), random_tokens(1, 14)
    mask = torch.tensor([[1, 1, 1, 0, 1, 1, 1, 0, 0] + [1] * 5])
    past = CACHES[cache](model)
    with torch.no_grad():
        model(tokens[:, :9], attention_mask=mask[:, :9], past_key_values=past)
        past.crop(-3)
        assert past.get_seq_length() == 6
        found = [model(tokens[:, 6:9], attention_mask=mask[:, :9], past_key_values=past).logits]
        found.append(model(tokens[:, 9:], attention_mask=mask, past_key_values=past).logits)
    text = mask[0, 6:].bool()
    wanted = alone(model, tokens[0, mask[0].bool()])[5:]
    torch.testing.assert_close(torch.cat(found, dim=1)[0, text], wanted, rtol=1e-4, atol=1e-4)


def test_tokens_of_a_padded_prompt_are_not_taken_back_where_rows_differ() -> None:
    model, tokens = small_model(), random_tokens(4, 12)
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens, attention_mask=MASK, past_key_values=past)
    with pytest.raises(ValueError, match=r"^cannot crop to 10 tokens: there is padding among the first 12, another"):
        past.crop(-2)
    past.crop(-12)
    assert past.get_seq_length() == 0
    with torch.no_grad():
        found = model(tokens, attention_mask=MASK, past_key_values=past).logits
    assert_rows_as_alone(model, tokens, MASK, found)


def test_padding_between_cached_texts_of_another_cache_is_explained() -> None:
    model, tokens = small_model(), random_tokens(1, 5)
    stranger = Qwen3Config(**{name: SIZES[name] for name in SIZES if name != "initializer_range"})
    past: Cache = DynamicCache(config=stranger)
    mask = torch.tensor([[1, 1, 0, 0, 1]])
    with torch.no_grad():
        model(tokens[:, :4], attention_mask=mask[:, :4], past_key_values=past)
        with pytest.raises(ValueError, match=r"^attention_mask has zeros between the ones of row 0, after text that"):
            model(tokens[:, 4:], attention_mask=mask, past_key_values=past)


OPTIONS: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 8}


@every_variant
def test_right_padded_prompts_generate_with_a_cache_as_without(variant: str) -> None:
    model, prompt = small_model(variant), random_tokens(2, 9)
    mask = torch.ones_like(prompt)
    mask[0, 5:] = 0
    wanted = model.generate(prompt, attention_mask=mask, use_cache=False, **OPTIONS)
    assert torch.equal(model.generate(prompt, attention_mask=mask, **OPTIONS), wanted)
    assert torch.equal(model.generate(prompt, attention_mask=mask, cache_implementation="static", **OPTIONS), wanted)


@pytest.mark.parametrize("place", [0, 4, 8])
@pytest.mark.parametrize("more", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}], ids=str)
def test_prompt_that_contains_the_pad_token_generates_with_a_cache_as_without(place: int, more: dict[str, int]) -> None:
    model, prompt = small_model("context_adaptive"), random_tokens(1, 9).clamp(min=1)
    prompt[0, place] = 0
    # Without a mask, generate takes such tokens for padding. Looking up tokens in the prompt needs a cache.
    beams = {name: value for name, value in more.items() if name == "num_beams"}
    wanted = model.generate(prompt, use_cache=False, **OPTIONS, **beams)
    assert torch.equal(model.generate(prompt, **OPTIONS, **more), wanted)


def test_labels_of_padding_anywhere_are_those_of_neighbours_in_the_text() -> None:
    model, tokens = small_model(), random_tokens(1, 8)
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1]])
    with torch.no_grad():
        found = model(tokens, attention_mask=mask, labels=tokens)
        logits = alone(model, tokens[0, mask[0].bool()])
    wanted = torch.nn.functional.cross_entropy(logits[[0, 1, 3, 4]], tokens[0, [1, 2, 6, 7]])
    torch.testing.assert_close(found.loss, wanted)


def test_hidden_states_records_and_weights_stand_where_the_tokens_were_given() -> None:
    model, tokens = small_model("context_adaptive"), random_tokens(1, 8)
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 0]])
    text = mask[0].bool()
    options = {"output_hidden_states": True, "output_records": True, "output_attentions": True, "use_cache": True}
    with torch.no_grad():
        found = model(tokens, attention_mask=mask, **options)
        wanted = model(tokens[:, text], **options)
    for one, other in zip(found.hidden_states, wanted.hidden_states, strict=True):
        torch.testing.assert_close(one[:, text], other)
    for one, other in zip(found.attentions, wanted.attentions, strict=True):
        torch.testing.assert_close(one[:, :, text][..., text], other)
        assert not one[..., ~text].any()
    given = text.nonzero()[:, 0]
    for one, other in zip(found.records, wanted.records, strict=True):
        torch.testing.assert_close(one["gate"][:, :, text], other["gate"])
        selected = torch.where(other["selected"] < 0, other["selected"], given[other["selected"].clamp(min=0)])
        kept = one["selected"][:, :, text][..., : selected.shape[-1]]
        assert torch.equal(kept.sort(dim=-1).values, selected.sort(dim=-1).values)
