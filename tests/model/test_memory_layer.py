"""Caches of transformers hold our memories; what a caller's own layers cannot hold is refused in one sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, Cache, DynamicCache, QuantizedCache, Qwen3Config, StaticCache
from transformers.cache_utils import (
    BaseQuantizedLayer,
    DynamicLayer,
    Fp8QuantizedLayer,
    QuantizedLayer,
    StaticLayer,
)

from tests.model.models import SIZES, VARIANTS, mechanisms, random_tokens, small_config, small_model
from varifocal.attention.memories import KeysAndValues, Memory, SegmentSummaries
from varifocal.kernels.native import backend as native
from varifocal.kernels.native import library
from varifocal.model import VarifocalConfig, VarifocalForCausalLM
from varifocal.model.memory_layer import LAYER_TYPE, MemoryLayer, StaticMemoryLayer

LENGTH = 24
NEW = 12
every_variant = pytest.mark.parametrize("variant", VARIANTS)

OWN_CACHES: dict[str, Callable[[VarifocalConfig], Cache]] = {
    "dynamic": lambda config: DynamicCache(config=config),
    "dynamic without config": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config=config, max_cache_len=LENGTH + 7),
}

PLAIN = [
    variant
    for variant in VARIANTS
    if VARIANTS[variant][0] not in ("dynamic_sparse", "combiner", "sparse_geometric", "routing", "infini")
]
NOT_PLAIN = [
    "dynamic_sparse",
    "dynamic_sparse blocks",
    "dynamic_sparse input",
    "combiner",
    "sparse_geometric",
    "routing",
    "infini",
    "infini delta",
]


def stranger(**changes: Any) -> Qwen3Config:
    """The config of another model with the same heads."""
    return Qwen3Config(**(SIZES | changes))


def fed(model: VarifocalForCausalLM, tokens: Tensor, chunks: list[int], cache: Cache) -> Tensor:
    """The logits of tokens that arrive in chunks."""
    with torch.no_grad():
        parts = [model(chunk, past_key_values=cache).logits for chunk in torch.split(tokens, chunks, dim=1)]
    return torch.cat(parts, dim=1)


def full(model: VarifocalForCausalLM, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(tokens, use_cache=False).logits
    return logits


def assert_equal(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def memories(cache: Cache) -> list[Memory]:
    found = [layer.memory for layer in cache.layers]
    assert all(isinstance(memory, Memory) for memory in found)
    return found


@every_variant
@pytest.mark.parametrize("kind", OWN_CACHES)
def test_caches_of_transformers_hold_the_memories_of_the_mechanisms(variant: str, kind: str) -> None:
    model = small_model(variant)
    cache = OWN_CACHES[kind](model.config)
    fed(model, random_tokens(2, LENGTH), [10, *[1] * 14], cache)
    layer_type = StaticMemoryLayer if kind == "static" else MemoryLayer
    assert [type(layer) for layer in cache.layers] == [layer_type] * 2
    wanted = [type(mechanism.memory()) for mechanism in mechanisms(model)]
    assert [type(memory) for memory in memories(cache)] == wanted
    assert cache.get_seq_length() == LENGTH
    assert cache.get_max_length() == (LENGTH + 7 if kind == "static" else -1)


@every_variant
def test_layer_types_of_a_config_are_what_its_caches_hold(variant: str, tmp_path: Path) -> None:
    config = small_config(variant)
    assert config.layer_types == [LAYER_TYPE] * 2
    assert config.sliding_window is None
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert loaded.layer_types == config.layer_types
    assert [type(layer) for layer in DynamicCache(config=loaded).layers] == [MemoryLayer] * 2
    assert [type(layer) for layer in StaticCache(config=loaded, max_cache_len=9).layers] == [StaticMemoryLayer] * 2


@pytest.mark.parametrize("given", [["full_attention"] * 2, ["sliding_attention", "full_attention"]])
def test_layer_types_that_are_given_do_not_change_what_a_config_says(given: list[str]) -> None:
    assert small_config(layer_types=given).layer_types == [LAYER_TYPE] * 2


@pytest.mark.parametrize("variant", PLAIN)
@pytest.mark.parametrize("filled", [False, True], ids=["empty", "filled"])
def test_layers_of_a_caller_serve_plain_mechanisms_and_are_never_exchanged(variant: str, filled: bool) -> None:
    model, tokens = small_model(variant), random_tokens(2, LENGTH)
    cache = DynamicCache(config=stranger())
    mine = list(cache.layers)
    assert {type(layer) for layer in mine} == {DynamicLayer}
    chunks = [10, 1, 1, 12] if filled else [LENGTH]
    assert_equal(fed(model, tokens, chunks, cache), full(model, tokens))
    assert all(one is other for one, other in zip(cache.layers, mine, strict=True))
    assert {layer.keys.shape[2] for layer in cache.layers} == {LENGTH}


@pytest.mark.parametrize("variant", PLAIN)
def test_static_layers_of_a_caller_serve_plain_mechanisms(variant: str) -> None:
    model, tokens = small_model(variant), random_tokens(2, LENGTH)
    cache = StaticCache(config=stranger(), max_cache_len=LENGTH + 5)
    assert {type(layer) for layer in cache.layers} == {StaticLayer}
    assert_equal(fed(model, tokens, [10, 1, 1, 12], cache), full(model, tokens))


@pytest.mark.parametrize("variant", NOT_PLAIN)
@pytest.mark.parametrize("kind", ["dynamic", "static", "filled elsewhere"])
def test_layers_without_room_for_a_memory_are_refused_in_one_sentence(variant: str, kind: str) -> None:
    model = small_model(variant)
    cache: Cache = DynamicCache()
    if kind == "dynamic":
        cache = DynamicCache(config=stranger())
    elif kind == "static":
        cache = StaticCache(config=stranger(), max_cache_len=LENGTH)
    else:
        for layer in range(2):
            cache.update(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8), layer)
    before, held = list(cache.layers), int(cache.get_seq_length())
    name = VARIANTS[variant][0]
    kind_of_layer = type(before[0]).__name__
    sentence = (
        f"^{name} remembers more than keys and values, for which a {kind_of_layer} has no room; "
        r"make the cache with the model's config, as in DynamicCache\(config=model\.config\)$"
    )
    with torch.no_grad(), pytest.raises(ValueError, match=sentence):
        model(random_tokens(1, 4), past_key_values=cache)
    assert all(one is other for one, other in zip(cache.layers, before, strict=True))
    assert int(cache.get_seq_length()) == held


def sliding_cache(window: int, *, static: bool) -> Cache:
    config = stranger(use_sliding_window=True, sliding_window=window, layer_types=["sliding_attention"] * 2)
    return StaticCache(config=config, max_cache_len=LENGTH) if static else DynamicCache(config=config)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize(("variant", "window"), [("dense", 5), ("local", 5), ("local window", 4)])
def test_layers_that_forget_what_a_mechanism_reads_are_refused_in_one_sentence(
    variant: str, window: int, static: bool
) -> None:
    model, cache = small_model(variant), sliding_cache(window, static=static)
    reach = "all keys" if variant != "local window" else "5 keys"
    kind = "StaticSlidingWindowLayer" if static else "DynamicSlidingWindowLayer"
    sentence = (
        f"^{VARIANTS[variant][0]} reads {reach} back, of which a {kind} keeps {window}; make the cache with the model's"
    )
    with torch.no_grad(), pytest.raises(ValueError, match=sentence):
        model(random_tokens(1, 4), past_key_values=cache)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("window", [5, 9])
def test_sliding_layers_of_a_caller_serve_a_window_that_is_no_wider(window: int, static: bool) -> None:
    model, tokens = small_model("local window"), random_tokens(2, LENGTH)
    cache = sliding_cache(window, static=static)
    assert_equal(fed(model, tokens, [3, 9, 1, 1, 10], cache), full(model, tokens))


def test_cache_of_a_model_with_fewer_layers_is_refused_in_one_sentence() -> None:
    cache = DynamicCache(config=stranger(num_hidden_layers=1))
    with torch.no_grad(), pytest.raises(ValueError, match=r"^the cache has 1 layers, and this is layer 1 of the model"):
        small_model()(random_tokens(1, 4), past_key_values=cache)


def test_quantized_cache_of_our_config_is_refused() -> None:
    with pytest.raises(ValueError, match="only supported for models with only full attention layers"):
        QuantizedCache("fp8", small_config())


def test_generation_with_a_quantized_cache_is_refused() -> None:
    model, prompt = small_model(), random_tokens(1, 6)
    with pytest.raises(ValueError, match="only supported for models with only full attention layers"):
        model.generate(
            prompt, max_new_tokens=2, cache_implementation="quantized", cache_config={"backend": "fp8"}, pad_token_id=0
        )


class HalvedLayer(QuantizedLayer):  # type: ignore[misc]
    """A stand-in for the layers of quanto and hqq: states beyond a few tokens are rounded to bfloat16."""

    def __init__(self) -> None:
        super().__init__(residual_length=4)

    def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
        return tensor.bfloat16()

    def _dequantize(self, q_tensor: Tensor) -> Tensor:
        return q_tensor.float()


@pytest.mark.parametrize("layer", [Fp8QuantizedLayer, HalvedLayer], ids=lambda layer: layer.__name__)
@pytest.mark.parametrize("variant", NOT_PLAIN)
def test_quantized_layers_are_refused_for_what_needs_more_than_keys_and_values(
    variant: str, layer: type[BaseQuantizedLayer]
) -> None:
    cache = Cache(layers=[layer(), layer()])
    with torch.no_grad(), pytest.raises(ValueError, match=f"for which a {layer.__name__} has no room; make the cache"):
        small_model(variant)(random_tokens(1, 4), past_key_values=cache)


@pytest.mark.parametrize(("layer", "error"), [(Fp8QuantizedLayer, 0.2), (HalvedLayer, 0.02)])
def test_quantized_layers_serve_plain_mechanisms_to_their_rounding(
    layer: type[BaseQuantizedLayer], error: float
) -> None:
    model, tokens = small_model(), random_tokens(2, LENGTH)
    found = fed(model, tokens, [10, *[1] * 14], Cache(layers=[layer(), layer()]))
    wanted = full(model, tokens)
    assert 0 < float((found - wanted).abs().max() / wanted.abs().max()) < error


OFFLOADED = (
    r"^a cache with offloading=True moves layers from a GPU to main memory, and this model is on the cpu; "
    r"leave offloading out$"
)


@pytest.mark.parametrize("kind", ["dynamic", "dynamic without config", "static", "another model's"])
def test_offloaded_cache_on_a_cpu_is_refused_in_one_sentence(kind: str) -> None:
    model = small_model()
    cache = {
        "dynamic": lambda: DynamicCache(config=model.config, offloading=True),
        "dynamic without config": lambda: DynamicCache(offloading=True),
        "static": lambda: StaticCache(config=model.config, max_cache_len=9, offloading=True),
        "another model's": lambda: DynamicCache(config=stranger(), offloading=True),
    }[kind]()
    with torch.no_grad(), pytest.raises(ValueError, match=OFFLOADED):
        model(random_tokens(1, 4), past_key_values=cache)


@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
def test_generation_with_an_offloaded_cache_on_a_cpu_is_refused_in_one_sentence(kind: str) -> None:
    with pytest.raises(ValueError, match=OFFLOADED):
        generate(small_model(), random_tokens(1, 4), cache_implementation=kind)


@every_variant
@pytest.mark.parametrize("kind", OWN_CACHES)
def test_copies_of_a_filled_cache_go_on_by_themselves(variant: str, kind: str) -> None:
    model, tokens = small_model(variant), random_tokens(2, LENGTH)
    other = torch.cat((tokens[:, :14], random_tokens(2, LENGTH - 14, seed=8)), dim=1)
    cache = OWN_CACHES[kind](model.config)
    fed(model, tokens[:, :14], [10, 1, 1, 1, 1], cache)
    twin = copy.deepcopy(cache)
    found, beside = [], []
    for token in range(14, LENGTH):
        one = slice(token, token + 1)
        found.append(fed(model, tokens[:, one], [1], cache))
        beside.append(fed(model, other[:, one], [1], twin))
    assert_equal(torch.cat(found, dim=1), full(model, tokens)[:, 14:])
    assert_equal(torch.cat(beside, dim=1), full(model, other)[:, 14:])


@every_variant
@pytest.mark.parametrize("kind", OWN_CACHES)
def test_reset_cache_serves_another_text(variant: str, kind: str) -> None:
    model, tokens = small_model(variant), random_tokens(3, LENGTH, seed=4)
    cache = OWN_CACHES[kind](model.config)
    fed(model, random_tokens(2, 14), [10, 1, 1, 1, 1], cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_equal(fed(model, tokens, [10, *[1] * 14], cache), full(model, tokens))


@every_variant
def test_rows_are_repeated_and_selected(variant: str) -> None:
    model, tokens = small_model(variant), random_tokens(2, LENGTH)
    cache = DynamicCache(config=model.config)
    fed(model, tokens[:, :14], [10, 1, 1, 1, 1], cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0, 1]))
    rows = tokens[torch.tensor([1, 0, 0])]
    assert_equal(fed(model, rows[:, 14:], [1, 1, 8], cache), full(model, rows)[:, 14:])


@every_variant
def test_tokens_are_taken_back_from_a_cache_that_records_its_past(variant: str) -> None:
    model, tokens = small_model(variant), random_tokens(2, LENGTH)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    fed(model, tokens[:, :12], [10, 1, 1], cache)
    cache.crop(0)
    for begin in (12, 15):
        fed(model, random_tokens(2, 5, seed=9), [4, 1], cache)
        cache.crop(-5)
        assert_equal(fed(model, tokens[:, begin : begin + 3], [3], cache), full(model, tokens)[:, begin : begin + 3])
        cache.crop(0)
    assert cache.get_seq_length() == 18


def test_tokens_that_were_forgotten_are_not_taken_back() -> None:
    model = small_model("local window")
    cache = DynamicCache(config=model.config)
    fed(model, random_tokens(2, 14), [14], cache)
    with pytest.raises(ValueError, match=r"^cannot take back 2 tokens: a window of 5 keys forgot 10 before them; call"):
        cache.crop(-2)


def test_crop_to_a_length_is_refused_in_one_sentence() -> None:
    model = small_model()
    cache = DynamicCache(config=model.config)
    fed(model, random_tokens(2, 14), [14], cache)
    with pytest.raises(ValueError, match=r"^crop takes a negative number of tokens to remove, got 3$"):
        cache.crop(3)


def test_static_cache_that_is_full_says_so_in_one_sentence() -> None:
    model = small_model("dynamic_sparse")
    cache = StaticCache(config=model.config, max_cache_len=9)
    fed(model, random_tokens(1, 8), [8], cache)
    with torch.no_grad(), pytest.raises(ValueError, match=r"^the cache has room for 9 tokens and holds 8, got 2 more$"):
        model(random_tokens(1, 2), past_key_values=cache)


def test_tokens_given_to_a_layer_without_a_model_are_plain_keys_and_values() -> None:
    cache, k, v = DynamicCache(config=small_config()), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
    cache.update(k, v, 0)
    keys, values = cache.update(k, v, 0)
    assert torch.equal(keys, torch.cat((k, k), dim=2))
    assert torch.equal(values, torch.cat((v, v), dim=2))


def test_tokens_given_to_a_memory_of_more_than_keys_and_values_are_refused_in_one_sentence() -> None:
    model = small_model("combiner")
    cache = DynamicCache(config=model.config)
    fed(model, random_tokens(1, 4), [4], cache)
    sentence = "^SegmentSummaries remembers more than keys and values; give the tokens to the model, which adds them"
    with pytest.raises(ValueError, match=sentence):
        cache.update(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8), 0)


@pytest.mark.parametrize("variant", ["context_adaptive blocks", "dynamic_sparse blocks"])
def test_model_decodes_with_kept_means(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = small_model(variant), random_tokens(2, LENGTH)
    asked: list[tuple[int, bool]] = []
    original = KeysAndValues.shortcuts

    def counted(self: KeysAndValues, *args: Any, new: int, **options: Any) -> Any:
        found = original(self, *args, new=new, **options)
        asked.append((new, found is not None))
        return found

    monkeypatch.setattr(KeysAndValues, "shortcuts", counted)
    cache = DynamicCache(config=model.config)
    found = fed(model, tokens, [10, *[1] * 14], cache)
    assert asked == [(10, False)] * 2 + [(1, True)] * 28
    monkeypatch.undo()
    assert_equal(found, full(model, tokens))


@pytest.mark.skipif(library.why_missing() is not None, reason="the native library was not built")
def test_combiner_reads_each_segment_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = small_model("combiner"), random_tokens(2, LENGTH)
    read: list[int] = []
    original = native.summarize

    def counted(problem: Any) -> Tensor:
        read.append(problem.k.shape[2])
        return original(problem)

    monkeypatch.setattr(native, "summarize", counted)
    cache = DynamicCache(config=model.config)
    found = fed(model, tokens, [2, 9, *[1] * 13], cache)
    # Segments of 4 in 2 layers: two are complete after 11 tokens, then one at 12, 16, 20 and 24.
    assert read == [8, 8, *[4] * 8]
    assert all(isinstance(memory, SegmentSummaries) for memory in memories(cache))
    assert_equal(found, full(model, tokens))


@every_variant
def test_gradients_flow_through_a_cache(variant: str) -> None:
    model, tokens = small_model(variant), random_tokens(1, 12)
    model.train()

    def gradient(chunks: list[int]) -> Tensor:
        model.zero_grad()
        cache = DynamicCache(config=model.config)
        parts = [
            model(chunk, past_key_values=cache, use_cache=True).logits for chunk in torch.split(tokens, chunks, dim=1)
        ]
        torch.cat(parts, dim=1).square().sum().backward()  # type: ignore[no-untyped-call]
        found = model.model.embed_tokens.weight.grad
        assert found is not None
        return found.clone()

    torch.testing.assert_close(gradient([7, 1, 4]), gradient([12]), rtol=1e-3, atol=1e-3)


def generate(model: VarifocalForCausalLM, prompt: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(5)
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
    found: Tensor = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    return found


@every_variant
def test_prompt_lookup_gives_the_greedy_tokens(variant: str) -> None:
    model = small_model(variant)
    prompt = random_tokens(1, 5).repeat(1, 4)  # what repeats itself is looked up
    assert torch.equal(generate(model, prompt, prompt_lookup_num_tokens=3), generate(model, prompt))


@every_variant
def test_assisted_decoding_gives_the_greedy_tokens(variant: str) -> None:
    model, prompt = small_model(variant), random_tokens(1, 9)
    for assistant in (small_model("local window", seed=3), small_model(variant)):
        assert torch.equal(generate(model, prompt, assistant_model=assistant), generate(model, prompt))


@pytest.mark.parametrize("variant", ["local window", "dynamic_sparse blocks", "combiner", "sparse_geometric"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2, "do_sample": True},
        {"num_return_sequences": 3, "do_sample": True},
        {"guidance_scale": 1.5},
    ],
    ids=lambda options: ", ".join(options),
)
def test_ways_to_generate_give_the_same_with_a_cache_as_without(variant: str, options: dict[str, Any]) -> None:
    model, prompt = small_model(variant), random_tokens(2, 9)
    assert torch.equal(generate(model, prompt, **options), generate(model, prompt, use_cache=False, **options))
