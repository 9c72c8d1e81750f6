"""The cost model is compared with steps that really ran."""

from __future__ import annotations

import pytest

from varifocal.bench.plan.calibration import calibrate, exponential_rate
from varifocal.bench.plan.run import CheckPlan, bench_plan
from varifocal.device import SharedCpu


def test_two_attentions_tell_exponentials_from_operations() -> None:
    # 1e9 operations and 5e8 exponentials a second, 1024 tokens.
    counts = ((1e6, 1e3), (2e5, 1e3))
    seconds = [1024 * (operations / 1e9 + functions / 5e8) for operations, functions in counts]
    assert exponential_rate(*zip(counts, seconds, strict=True)) == pytest.approx(5e8)


def test_exponentials_that_noise_hides_are_free() -> None:
    assert exponential_rate(((1e6, 1e3), 1.0), ((2e5, 1e3), 0.1)) == 1e13


def test_steps_are_measured_and_predicted_side_by_side() -> None:
    saved: list[int] = []
    check = CheckPlan(presets=("tiny",), lengths=(32, 64), names=("dense", "head_gated"), rounds=1)
    found = bench_plan(check, clock=SharedCpu(), on_rows=lambda now: saved.append(len(now.rows)))
    assert saved == [2, 4]
    assert found.clock == "processor"
    assert found.machine.measured
    rows = found.rows
    assert [(row.length, row.name) for row in rows] == [
        (32, "dense"), (32, "head_gated"), (64, "dense"), (64, "head_gated"),
    ]  # fmt: skip
    for row in rows:
        assert row.seconds > 0
        assert row.predicted_seconds == pytest.approx(sum(row.predicted_parts.values()))
        # Memory does not depend on who else uses the machine: weights, moments and gradients are most of it.
        assert row.predicted_bytes == pytest.approx(row.peak_bytes, rel=0.5)


def test_unknown_contender_is_named() -> None:
    with pytest.raises(ValueError, match="unknown contender 'nobody'"):
        CheckPlan(names=("nobody",))


def test_calibration_knows_every_mechanism_that_a_kernel_runs() -> None:
    machine = calibrate(rounds=1)
    assert set(machine.attention) >= {"dense", "local", "combiner", "context_adaptive blocks", "sparse_geometric"}
    assert all(rate > 0 for rate in machine.attention.values())
    assert machine.call > 0
