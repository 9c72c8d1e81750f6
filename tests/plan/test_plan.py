"""Predictions follow the arithmetic they are made of, and say what does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from varifocal.model import preset
from varifocal.plan.hardware import GPUS, find_gpu
from varifocal.plan.plan import Prediction, Training, every_variant, find_variants, predict
from varifocal.plan.step_cost import step_work
from varifocal.results.hardware import Hardware

A100 = find_gpu("a100")
MACHINE = Hardware(
    name="this-machine", memory=20e9, products={"float32": 1e11}, bandwidth=1e10, exponentials=1e9, link=1e9,
    price=None, measured=True, attention={"dense": 5e10, "context_adaptive blocks": 2e10}, call=1e-5,
)  # fmt: skip


def training(name: str = "dense", **changes: Any) -> Training:
    mechanism, options = every_variant()[name]
    config = preset("qwen-134m", mechanism=mechanism, mechanism_options=options)
    wanted: dict[str, Any] = {"config": config, "tokens": 1e10, "length": 2048, "devices": 8}
    return Training(**(wanted | changes))


def predicted(name: str = "dense", **changes: Any) -> Prediction:
    return predict(training(name, **changes), A100)


def test_hours_and_cost_follow_from_tokens_a_second() -> None:
    one = predict(training(), A100, price=2.0)
    assert one.hours == pytest.approx(1e10 / one.tokens_per_second / 3600)
    assert one.cost == pytest.approx(one.hours * 8 * 2.0)
    assert one.tokens_per_second == pytest.approx(512 * 2048 / one.step_seconds)


def test_eight_gpus_of_a_node_are_nearly_eight_times_as_fast_as_one() -> None:
    assert predicted().tokens_per_second / predicted(devices=1).tokens_per_second == pytest.approx(8, rel=0.02)


def test_slow_network_between_nodes_costs_time_when_a_step_is_short() -> None:
    near, far = predicted(batch=8, devices=8), predicted(batch=16, devices=16)
    assert far.seconds["exchange"] > near.seconds["exchange"]


@pytest.mark.parametrize("name", ["local", "combiner", "bigbird"])
def test_mechanism_that_reads_less_is_faster(name: str) -> None:
    assert predicted(name).tokens_per_second > predicted().tokens_per_second


def test_selection_on_a_gpu_gains_by_blocks_in_long_texts_and_key_by_key_never() -> None:
    """128 queries share a tile, and what they select for themselves lies in most tiles of a text."""
    for length in (2048, 32768):
        dense, exact, blocks = (
            predicted(name, length=length, micro_batch=1).tokens_per_second
            for name in ("dense", "dynamic_sparse", "dynamic_sparse blocks")
        )
        assert exact < dense
        assert (blocks > dense) == (length == 32768)


def test_network_for_every_pair_is_slower() -> None:
    assert predicted("sparse_geometric").tokens_per_second < 0.95 * predicted().tokens_per_second


def test_most_rows_that_fit_are_taken_and_no_more() -> None:
    one = predict(training(batch=4096), replace(A100, memory=20e9))
    assert one.fits
    assert 1 < one.micro_batch < 64
    assert not predict(training(batch=4096, micro_batch=2 * one.micro_batch), replace(A100, memory=20e9)).fits


def test_prediction_says_what_does_not_fit() -> None:
    small = find_gpu("l4")
    long: dict[str, Any] = {"length": 131072, "batch": 8, "micro_batch": 1}
    assert not predict(training(**long), small).fits
    assert predict(training(checkpointing=True, **long), small).fits


def test_measured_machine_takes_its_own_rates() -> None:
    one = predict(training(devices=1, batch=1, precision="float32"), MACHINE)
    assert one.cost is None
    assert one.seconds["starting operators"] > 0
    assert one.room == MACHINE.memory
    with pytest.raises(ValueError, match="this-machine was not measured with local; it was measured with dense"):
        predict(training("local", devices=1, batch=1, precision="float32"), MACHINE)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": 12}, "batch must be a multiple of the 8 devices, got 12"),
        ({"micro_batch": 3}, "micro-batch must divide the 64 rows"),
        ({"tokens": 0}, "tokens must be above 0"),
        ({"length": 1}, "context must be at least 2"),
    ],
)
def test_impossible_training_is_explained(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        training(**changes)


def test_gpu_without_a_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="v100 has no products in bfloat16; use --precision float32"):
        predict(training(), find_gpu("v100"))
    assert predict(training(precision="float32"), find_gpu("v100")).tokens_per_second > 0


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown GPU 'h101' \(did you mean 'h100'\?\)"):
        find_gpu("h101")
    with pytest.raises(ValueError, match=r"unknown mechanism 'hed_gated' \(did you mean 'head_gated'\?\)"):
        find_variants(["hed_gated"])


def test_table_of_gpus_is_in_its_units() -> None:
    assert find_gpu("A100") is GPUS["a100-80"]
    for one in GPUS.values():
        assert 20e9 < one.memory < 200e9
        assert 10e12 < one.products["float32"] < one.products.get("bfloat16", 1e15) < 2e15
        assert 0.2e12 < one.bandwidth < 10e12
        assert 1e12 < one.exponentials < 10e12


def test_limits_name_what_a_step_waits_for() -> None:
    """On an H100, attention at 8192 tokens; a pair network's exponentials outweigh all products."""
    shares = {}
    for mechanism in ("dense", "sparse_geometric"):
        config = preset("qwen-134m", mechanism=mechanism, max_position_embeddings=8192)
        found = predict(Training(config=config, tokens=1e9, length=8192, batch=8), find_gpu("h100"))
        shares[mechanism] = found.limits
        assert sum(found.limits.values()) == pytest.approx(1)
        assert list(found.limits.values()) == sorted(found.limits.values(), reverse=True)
    assert next(iter(shares["sparse_geometric"])) == "exponentials"
    assert shares["dense"]["exponentials"] < 0.2 < shares["dense"]["attention"]


def test_a_gpu_multiplies_whole_tiles() -> None:
    config = preset("qwen-134m", mechanism="local", mechanism_options={"window": 64})
    reading = step_work(config, replace(training(config=config, devices=1).part(1), tiles=True)).reading
    # A row of 128 queries reads its own tile, the one before it, and that of the first keys.
    pairs = 128 * 128 * (1 + 2 + 14 * 3)
    # Two products forward and seven backward, of heads of 128.
    assert reading == config.num_hidden_layers * config.num_attention_heads * pairs * 9 * 2 * config.head_dim
