"""The config: a mechanism for each layer, checked, completed and saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tests.model.models import VARIANTS, mechanisms, saved_fields, small_config, small_model
from varifocal import GateConfig, make_mechanism
from varifocal.model import VarifocalConfig, VarifocalForCausalLM, VarifocalModel


@pytest.mark.parametrize("variant", VARIANTS)
def test_config_comes_back_from_its_file(variant: str, tmp_path: Path) -> None:
    config = small_config(variant)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, VarifocalConfig)
    assert saved_fields(loaded) == saved_fields(config)


def test_config_file_names_the_mechanism_and_all_its_options(tmp_path: Path) -> None:
    small_config("head_gated").save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "varifocal"
    assert saved["mechanism"] == "head_gated"
    assert saved["mechanism_options"]["window"] == 5
    assert saved["mechanism_options"]["gate"]["kind"] == "linear"


def test_gate_may_be_given_as_a_value_and_is_saved_all_the_same(tmp_path: Path) -> None:
    config = small_config(mechanism="head_gated", mechanism_options={"gate": GateConfig(soft_cap=4.0)})
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).mechanism_options["gate"]["soft_cap"] == 4.0


def test_auto_classes_make_our_models() -> None:
    config = small_config()
    assert type(AutoModel.from_config(config)) is VarifocalModel
    assert type(AutoModelForCausalLM.from_config(config)) is VarifocalForCausalLM


def test_each_layer_has_its_own_mechanism() -> None:
    model = small_model(mechanism=["local", "head_gated"], mechanism_options=[{"window": 3, "sinks": 0}, {"window": 4}])
    assert [(one.name, one.config.window) for one in mechanisms(model)] == [("local", 3), ("head_gated", 4)]


def test_options_saved_under_an_earlier_name_still_load(tmp_path: Path) -> None:
    small_config("local").save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    saved["mechanism_options"] = {"window": 5, "global_tokens": 3}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert VarifocalConfig.from_pretrained(tmp_path).mechanism_options == {
        "window": 5, "sinks": 3, "sink_logit": False,
    }  # fmt: skip


def test_options_of_a_hybrid_may_be_given_by_mechanism() -> None:
    config = small_config(
        num_hidden_layers=3, mechanism=["local", "dense", "local"], mechanism_options={"local": {"window": 3}}
    )
    assert [config.layer_mechanism(layer).options.get("window") for layer in range(3)] == [3, None, 3]


def test_layers_draw_different_random_blocks() -> None:
    config = small_config("bigbird")
    assert [config.layer_mechanism(layer).options["seed"] for layer in range(2)] == [0, 1]


def test_seeds_that_are_given_for_each_layer_are_kept() -> None:
    config = small_config(mechanism=["bigbird"] * 2, mechanism_options=[{"seed": 7}, {"seed": 7}])
    assert [config.layer_mechanism(layer).options["seed"] for layer in range(2)] == [7, 7]


@pytest.mark.parametrize("variant", VARIANTS)
def test_mechanism_parameters_are_named_under_mechanism_and_nowhere_else(variant: str) -> None:
    mechanism, options = VARIANTS[variant]
    own = set(make_mechanism(mechanism, small_config(variant).head_shape(), **options).state_dict())
    dense = set(small_model("dense").state_dict())
    added = {f"model.layers.{layer}.self_attn.mechanism.{name}" for layer in range(2) for name in own}
    assert set(small_model(variant).state_dict()) == dense | added


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mechanism": "head_gate"}, "did you mean 'head_gated'"),
        ({"mechanism": ["dense", "lokal"]}, "did you mean 'local'"),
        ({"mechanism": ["dense"]}, "each of the 2 layers, got 1"),
        ({"mechanism": 3}, "must be a name, or a list"),
        ({"mechanism": "local", "mechanism_options": {"windw": 3}}, "did you mean 'window'"),
        ({"mechanism": "local", "mechanism_options": {"window": 0}}, "at least 1, got 0"),
        ({"mechanism": "local", "mechanism_options": [{"window": 3}]}, "must be a dict of its options"),
        ({"mechanism": ["local"] * 2, "mechanism_options": [{}]}, "each of the 2 layers, got 1"),
        ({"mechanism": ["local"] * 2, "mechanism_options": [{}, 3]}, "must be a dict, got 3"),
        ({"mechanism": ["local"] * 2, "mechanism_options": {"dense": {}}}, "which no layer has"),
        ({"mechanism": ["local"] * 2, "mechanism_options": "window"}, "a list with a dict for each layer"),
        ({"num_key_value_heads": 3}, "multiple of kv_heads"),
        ({"num_hidden_layers": 0}, "between 1 and 10000, got 0"),
        ({"attention_dropout": 0.1}, "must be 0, got 0.1"),
        ({"qk_norm": "yes"}, "True or False, got 'yes'"),
    ],
)
def test_bad_config_is_explained(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_config(**({"mechanism_options": None} | changes))


def test_new_gates_start_at_one_half() -> None:
    model = VarifocalForCausalLM(small_config("head_gated"))
    for mechanism in mechanisms(model):
        assert not mechanism.gate.output.weight.any()
        assert not mechanism.gate.output.bias.any()


def test_new_windows_start_in_the_middle_of_their_range() -> None:
    for mechanism in mechanisms(VarifocalForCausalLM(small_config("context_adaptive"))):
        assert not mechanism.width.weight.any()


def test_new_indexer_keys_and_queries_share_a_projection() -> None:
    mechanism = mechanisms(VarifocalForCausalLM(small_config("dynamic_sparse")))[1]
    assert torch.equal(mechanism.query_weight[0], mechanism.key_weight[0])
