"""A pilot on a small model: what it runs, what it says, and that the comparison goes on from it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.experiments.comparisons import SIZES, TrainHere, small_plan, small_probe
from varifocal.cli.main import app
from varifocal.experiments.comparison import compare
from varifocal.experiments.comparison_plan import Arm, ComparisonPlan, load_plan
from varifocal.experiments.pilot import pilot_plan, run_pilot
from varifocal.report.pilot import context_table, findings, power, power_table
from varifocal.results.pilot import Pilot
from varifocal.statistics.estimates import least_difference, seeds_needed
from varifocal.statistics.student import chi_squared, deviation_limit

SEEDS = (0, 1, 2)
CONFIG = """
mechanisms = ["combiner", "dense", {{ mechanism = "local", options = {{ window = 4, sinks = 0 }} }}]
seeds = [0, 1, 2]
[base.data]
path = "{data}"
[base.model]
preset = "tiny"
overrides = {{ {sizes} }}
[base.optimization]
steps = 3
batch = 4
length = 64
[base.validation]
every = 2
tokens = 256
trace_rows = 1
[base.run]
threads = 1
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_probe(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def plan(data: Path) -> ComparisonPlan:
    local = Arm(name="local", mechanism="local", options={"window": 4, "sinks": 0})
    return small_plan(data, "combiner", "dense", arms=(local,), seeds=SEEDS, smallest_effect=1e-9)


@pytest.fixture(scope="module")
def folder(plan: ComparisonPlan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pilot") / "out"
    pilot, failed = run_pilot(plan, out, train_cells=TrainHere())
    assert pilot is not None
    assert failed == {}
    return out


@pytest.fixture
def pilot(folder: Path) -> Pilot:
    return Pilot.read(folder / Pilot.filename)


def test_pilot_runs_two_seeds_of_baseline_and_first_other_arm(plan: ComparisonPlan, pilot: Pilot) -> None:
    assert [cell.name for cell in pilot_plan(plan).cells()] == [
        "combiner-seed0",
        "dense-seed0",
        "combiner-seed1",
        "dense-seed1",
    ]
    assert (pilot.baseline, pilot.arm, pilot.seeds) == ("dense", "combiner", (0, 1))
    assert pilot.difference.count == 2
    assert pilot.planned_cells == 9


def test_comparison_keeps_the_cells_of_its_pilot(plan: ComparisonPlan, folder: Path) -> None:
    again = TrainHere()
    compare(plan, folder, train_cells=again)
    assert again.trained == ["local-seed0", "local-seed1", "combiner-seed2", "dense-seed2", "local-seed2"]


def test_seeds_follow_from_the_measured_spread(pilot: Pilot) -> None:
    spread = pilot.difference.deviation
    assert spread is not None
    assert pilot.spread_limit == pytest.approx(spread * 3.9472, rel=1e-3)
    assert [one.seeds for one in pilot.needed] == [
        seeds_needed(one.effect, spread, comparisons=2) for one in pilot.needed
    ]
    assert len(power_table(pilot)) == 1 + len(pilot.needed)


def test_plan_that_cannot_tell_its_smallest_effect_says_so(pilot: Pilot) -> None:
    assert any("It could not tell its smallest interesting effect, 1e-09" in one for one in findings(pilot))
    assert power(pilot, seeds=1, differences=2).startswith("One seed tells no difference from chance")


def test_pilot_of_equal_arms_claims_no_power(pilot: Pilot) -> None:
    equal = replace(pilot, difference=replace(pilot.difference, mean=0.0, deviation=0.0, half_width=0.0))
    assert "tells no spread" in power(equal, seeds=3, differences=2)


def test_worth_of_far_text_is_told_by_window(pilot: Pilot) -> None:
    assert [one.window for one in pilot.context] == [8, 16, 32]
    assert all(one.worth.count > 1 and math.isfinite(one.worth.mean) for one in pilot.context)
    assert len(context_table(pilot)) == 4


def test_command_prints_the_pilot_and_the_comparison_begins_with_it(data: Path, folder: Path, tmp_path: Path) -> None:
    sizes = ", ".join(f"{name} = {value}" for name, value in SIZES.items())
    (tmp_path / "plan.toml").write_text(CONFIG.format(data=data, sizes=sizes))
    console = CliRunner()
    first = console.invoke(app, ["compare", str(tmp_path / "plan.toml"), str(folder), "--pilot"])
    assert first.exit_code == 0, first.output
    assert "Paired spread of combiner against dense, seeds 0 and 1" in " ".join(first.output.split())
    # Nothing is trained here either: the command finds the cells of the pilot.
    arms = ["compare", str(tmp_path / "plan.toml"), str(folder), "--set", "optimization.steps=4"]
    refused = console.invoke(app, arms)
    assert refused.exit_code != 0
    assert "tell effects from" in refused.output


def test_pilot_with_one_seed_is_refused(data: Path) -> None:
    with pytest.raises(ValueError, match=r"a pilot needs 2 seeds to tell their spread, got \[0\]"):
        pilot_plan(small_plan(data, "dense", "local"))


def test_pilot_without_another_arm_is_refused(data: Path) -> None:
    with pytest.raises(ValueError, match="needs an arm beside the baseline 'dense'"):
        pilot_plan(small_plan(data, "dense", seeds=SEEDS))


def test_smallest_effect_is_read_from_the_file(tmp_path: Path) -> None:
    text = "mechanisms = ['dense']\n{}\n[base.data]\npath = 'data'\n[base.optimization]\nsteps = 3\n"
    (tmp_path / "plan.toml").write_text(text.format("smallest_effect = 0.02"))
    assert load_plan(tmp_path / "plan.toml").smallest_effect == 0.02
    (tmp_path / "plan.toml").write_text(text.format("smallest_effect = 'small'"))
    with pytest.raises(ValueError, match="smallest_effect must be a number of nats a token, got 'small'"):
        load_plan(tmp_path / "plan.toml")
    (tmp_path / "plan.toml").write_text(text.format("smallest_effect = 0"))
    with pytest.raises(ValueError, match=r"smallest_effect must be above 0 nats a token, got 0"):
        load_plan(tmp_path / "plan.toml")


def test_more_differences_need_more_seeds() -> None:
    one, four = seeds_needed(0.02, 0.02), seeds_needed(0.02, 0.02, comparisons=4)
    assert one is not None
    assert four is not None
    assert one < four
    assert least_difference(one, 0.02) <= 0.02 < least_difference(one - 1, 0.02)


def test_spread_of_few_seeds_is_uncertain_as_the_tables_say() -> None:
    # Quantiles of the chi-squared distribution from any table: 3.8415 (v = 1), 11.0705 (v = 5), both 95 %.
    assert chi_squared(3.8415, 1) == pytest.approx(0.95, abs=1e-5)
    assert chi_squared(11.0705, 5) == pytest.approx(0.95, abs=1e-5)
    # 0.0642 is what chi-squared with one degree of freedom undercuts once in five times, 1.6488 with four.
    assert deviation_limit(1.0, 1) == pytest.approx(math.sqrt(1 / 0.064185), rel=1e-4)
    assert deviation_limit(1.0, 4) == pytest.approx(math.sqrt(4 / 1.648777), rel=1e-4)
