"""What a preset is said to cost is what its model has and does."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.model.models import VARIANTS, small_config, small_model
from varifocal.attention.memories import RecentKeys
from varifocal.model import PRESETS, VarifocalForCausalLM, preset
from varifocal.plan.cost import cache_size, flops_per_token, layer_mechanisms, parameters_by_part
from varifocal.plan.work import work


@pytest.mark.parametrize("variant", VARIANTS)
def test_parts_add_up_to_the_models_parameters(variant: str) -> None:
    parts = parameters_by_part(small_config(variant))
    model = small_model(variant)
    assert sum(parts.values()) == sum(p.numel() for p in model.parameters())
    assert parts["mechanism"] == sum(p.numel() for name, p in model.named_parameters() if "mechanism" in name)


def test_untied_head_is_a_part_of_its_own() -> None:
    tied, apart = (parameters_by_part(small_config(tie_word_embeddings=tie)) for tie in (True, False))
    assert tied["head"] == 0
    assert apart["head"] == apart["embedding"]


def test_papers_sizes_are_within_half_a_percent() -> None:
    for name, wanted in (("qwen-134m", 134e6), ("qwen-132m", 132e6)):
        assert sum(parameters_by_part(preset(name)).values()) == pytest.approx(wanted, rel=0.005)


def test_products_with_weights_are_those_that_torch_counts() -> None:
    model = VarifocalForCausalLM(small_config())
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(input_ids=torch.arange(32)[None], use_cache=False)
    # The native kernel is one operator that torch's counter knows nothing of; what it counts are the weights' products.
    assert counter.get_total_flops() == 32 * flops_per_token(model.config, 32).weights


def test_dense_attention_reads_half_of_the_text_on_average() -> None:
    config = small_config()
    assert work(layer_mechanisms(config)[0], 64).keys_read == pytest.approx(65 / 2)
    reading = 4 * 8 * 4 * (65 / 2) * config.num_hidden_layers
    assert flops_per_token(config, 64).reading == pytest.approx(reading)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("mechanism", ["local", "combiner", "dynamic_sparse", "context_adaptive", "bigbird"])
def test_sparse_mechanisms_read_less_than_dense_ones(name: str, mechanism: str) -> None:
    length = preset(name).max_position_embeddings
    sparse, dense = (flops_per_token(preset(name, mechanism=one), length).reading for one in (mechanism, "dense"))
    assert sparse < dense


@pytest.mark.parametrize("variant", VARIANTS)
def test_cache_holds_as_many_bytes_as_predicted(variant: str) -> None:
    model, length = small_model(variant), 40
    with torch.no_grad():
        cache = model(input_ids=torch.randint(0, 61, (1, length)), use_cache=True).past_key_values
    kept = sum(layer.bytes for layer in cache.layers)
    said = cache_size(model.config, length)
    memories = [one.memory() for one in layer_mechanisms(model.config)]
    if any(isinstance(one, RecentKeys) for one in memories):
        # A layer that looks back a bounded way keeps one token fewer than it reads: the next one brings its own.
        assert kept == said.at_length - said.per_token
    else:
        assert kept == said.at_length
        assert all(one.keeps_all for one in memories) == (kept == length * said.per_token)
