"""Ablations by name: each makes a model, says what it ablates, and is found by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.experiments.comparisons import small_base
from varifocal.attention.mechanisms.registry import config_from_options
from varifocal.experiments.ablations import ablation_arms, every_ablation, find_ablations, sizes_of
from varifocal.experiments.comparison_plan import Cell, ComparisonPlan
from varifocal.results.papers import paper_tables
from varifocal.training.config import config_from
from varifocal.training.start import model_config

ABLATIONS = every_ablation()
BASE = config_from({
    "data": {"path": "data/any"},
    "model": {"preset": "tiny"},
    "optimization": {"steps": 95, "batch": 8, "micro_batch": 2, "length": 512},
})  # fmt: skip
SIZES = sizes_of(BASE)


@pytest.mark.parametrize("name", ABLATIONS)
def test_ablation_makes_another_model_or_another_training(name: str) -> None:
    arms = {arm.name: arm for arm in ablation_arms([name], SIZES)}
    plan = ComparisonPlan(title="one", base=BASE, arms=tuple(arms.values()))
    ablated, dense = (plan.config(Cell(arm=arms[one], seed=0)) for one in (name, "dense"))
    model = model_config(ablated, None)
    reference = arms[name].reference
    full = dense if reference is None else plan.config(Cell(arm=arms[reference], seed=0))
    different = model.to_dict() != model_config(full, None).to_dict()
    assert different or ablated.optimization != full.optimization


def test_ablations_of_the_papers_tables_exist() -> None:
    quoted = {row.mechanism for table in paper_tables() for row in table.rows if "." in row.mechanism}
    assert quoted <= set(ABLATIONS)


def test_baseline_and_full_mechanism_stand_beside_an_ablation() -> None:
    arms = ablation_arms(["head_gated.no_gate"], SIZES)
    assert [arm.name for arm in arms] == ["dense", "head_gated", "head_gated.no_gate"]
    assert [arm.reference for arm in arms] == [None, None, "head_gated"]


def test_mechanism_stands_for_all_of_its_ablations() -> None:
    names = [one.name for one in find_ablations(["sparse_geometric"])]
    assert names == [
        f"sparse_geometric.{name}" for name in ("no_scaling", "fixed_sparsity", "both_off", "additive", "threshold")
    ]


def test_no_name_stands_for_every_ablation() -> None:
    assert [one.name for one in find_ablations([])] == list(ABLATIONS)


def test_windows_keep_their_proportion_to_the_presets() -> None:
    windows = {
        arm.name: config_from_options("head_gated", arm.options).window  # type: ignore[attr-defined, arg-type]
        for arm in ablation_arms(["head_gated"], SIZES)
        if arm.name.endswith("_window")
    }
    assert windows == {"head_gated.quarter_window": 16, "head_gated.half_window": 32, "head_gated.double_window": 128}


def test_hybrid_has_a_mechanism_for_each_layer(tmp_path: Path) -> None:
    (_, arm) = ablation_arms(["hybrid.local_below"], sizes_of(small_base(tmp_path)))
    assert arm.mechanism == ("local", "dense")


def test_gate_warmup_takes_a_tenth_of_the_steps() -> None:
    arm = ablation_arms(["head_gated.gate_warmup"], SIZES)[-1]
    assert arm.changes == {"optimization.gate_warmup_steps": 10}


def test_normalized_gradient_follows_the_tokens_of_a_call() -> None:
    arm = ablation_arms(["context_adaptive.normalized_gradient"], SIZES)[-1]
    assert isinstance(arm.options, dict)
    assert arm.options["gate"]["normalize_gradient"] == pytest.approx(0.01 / (2 * 512))


def test_unknown_ablation_is_named_with_the_nearest_known_one() -> None:
    with pytest.raises(
        ValueError, match=r"unknown ablation 'head_gated.nogate' \(did you mean 'head_gated.no_gate'\?\)"
    ):
        find_ablations(["head_gated.nogate"])
