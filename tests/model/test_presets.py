"""Models by name: the papers' sizes, and options that follow the context."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from varifocal import MECHANISMS
from varifocal.model import PRESETS, VarifocalConfig, VarifocalForCausalLM, preset


def options(config: VarifocalConfig) -> dict[str, Any]:
    assert isinstance(config.mechanism_options, dict)
    return config.mechanism_options


def parameters(config: VarifocalConfig) -> int:
    with torch.device("meta"):
        model = VarifocalForCausalLM(config)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "expected"), [("qwen-134m", 134_430_208), ("qwen-132m", 132_070_912)])
def test_dense_preset_has_the_papers_number_of_parameters(name: str, expected: int) -> None:
    assert parameters(preset(name)) == expected


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_mechanism_adds_at_most_a_hundredth(mechanism: str) -> None:
    assert parameters(preset("qwen-134m", mechanism=mechanism)) <= 134_430_208 * 1.01


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("name", PRESETS)
def test_every_mechanism_fits_every_preset(name: str, mechanism: str) -> None:
    config = preset(name, mechanism=mechanism)
    assert config.layer_mechanism(0).name == mechanism


def test_windows_and_segments_follow_the_preset() -> None:
    assert options(preset("tiny", mechanism="head_gated"))["window"] == 64
    assert options(preset("small", mechanism="local"))["window"] == 128
    assert options(preset("qwen-134m", mechanism="context_adaptive"))["window_max"] == 512
    assert options(preset("tiny", mechanism="combiner"))["segment"] == 32


def test_segments_follow_a_longer_context() -> None:
    config = preset("tiny", mechanism="combiner", max_position_embeddings=4096)
    assert (config.max_position_embeddings, options(config)["segment"]) == (4096, 64)


def test_given_options_go_before_those_of_the_preset() -> None:
    config = preset("tiny", mechanism="local", mechanism_options={"window": 7}, vocab_size=300, num_hidden_layers=2)
    assert (options(config)["window"], config.vocab_size, config.num_hidden_layers) == (7, 300, 2)


def test_hybrid_preset_has_options_for_each_of_its_mechanisms() -> None:
    config = preset("tiny", mechanism=["local", "dense", "local", "combiner"])
    assert set(options(config)) == {"local", "dense", "combiner"}


def test_presets_rotate_like_qwen3() -> None:
    assert preset("tiny").rope_parameters["rope_theta"] == 1e6


def test_unknown_preset_is_explained() -> None:
    with pytest.raises(ValueError, match="did you mean 'tiny'"):
        preset("tinny")
