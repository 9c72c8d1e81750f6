"""A budget in processor seconds: the run ends by it, the learning rate follows it, and a checkpoint keeps it."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tests.training.runs import small_config
from varifocal.data import PreparedData
from varifocal.results.metrics import read_metrics
from varifocal.training.budget import TrainingClock, rate_factor
from varifocal.training.checkpoints import newest_whole
from varifocal.training.config import OptimizationSection, TrainingConfig
from varifocal.training.run import train
from varifocal.training.trainer import Progress


def timed_config(data: PreparedData) -> TrainingConfig:
    config = small_config(data, "dense")
    return replace(config, optimization=replace(config.optimization, steps=None, seconds=0.5))


def test_clock_counts_work_and_not_what_lies_before_a_start() -> None:
    clock = TrainingClock(elapsed=1.0, processor=2.0)
    sum(number * number for number in range(300_000))
    clock.start()
    assert (clock.elapsed, clock.processor) == (1.0, 2.0)
    sum(number * number for number in range(300_000))
    clock.tick()
    assert clock.elapsed > 1.0
    worked = clock.processor
    assert worked > 2.0
    time.sleep(0.2)
    clock.tick()
    assert clock.processor - worked < 0.1, "sleeping is not work"


def test_learning_rate_rises_over_its_share_and_falls_to_nothing() -> None:
    wanted = OptimizationSection(seconds=10, warmup_share=0.2)
    factors = [rate_factor(wanted, step=1, share=share) for share in (0.0, 0.1, 0.2, 0.6, 1.0, 1.5)]
    assert factors == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.0, 0.0])


def test_constant_rate_warms_up_by_steps() -> None:
    wanted = OptimizationSection(seconds=10, warmup_steps=4, schedule="constant")
    assert [rate_factor(wanted, step=step, share=0.9) for step in (0, 1, 4, 90)] == [0.0, 0.25, 1.0, 1.0]


def test_warmup_share_of_steps_is_a_number_of_steps(probe: PreparedData, tmp_path: Path) -> None:
    optimization = {"warmup_share": 0.5, "schedule": "constant", "learning_rate": 0.01}
    train(small_config(probe, "dense", optimization=optimization), tmp_path / "run")
    rates = [one.learning_rate for one in read_metrics(tmp_path / "run" / "metrics.jsonl") if one.loss is not None]
    assert rates == pytest.approx([0.0, 0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01, 0.01])


def test_run_ends_with_the_step_that_uses_its_seconds_up(probe: PreparedData, tmp_path: Path) -> None:
    summary = train(timed_config(probe), tmp_path / "run")
    steps = [one for one in read_metrics(tmp_path / "run" / "metrics.jsonl") if one.loss is not None]
    used = [one.processor_seconds or 0.0 for one in steps]
    assert summary.processor_seconds == used[-1]
    assert used[-2] < 0.5 <= used[-1]
    assert summary.steps == len(steps)
    assert steps[0].learning_rate == pytest.approx(0.01)
    for before, after in pairwise(steps):
        assert before.processor_seconds is not None
        # The rate of a step follows from what was used when the step before it was done; recording it takes a moment.
        share = before.processor_seconds / 0.5
        assert after.learning_rate == pytest.approx(0.005 * (1 + math.cos(math.pi * share)), abs=2e-4)


def test_resumed_run_goes_on_with_the_seconds_it_had(probe: PreparedData, tmp_path: Path) -> None:
    config = timed_config(probe)

    def interrupt(now: Progress) -> None:
        if now.step == 5 and now.loss is not None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", on_progress=interrupt)
    checkpoint = newest_whole(tmp_path / "run" / "checkpoints", on_damaged=pytest.fail)
    assert checkpoint is not None
    assert checkpoint.step == 4
    kept = checkpoint.state.processor_seconds
    recorded = {one.step: one for one in read_metrics(tmp_path / "run" / "metrics.jsonl") if one.loss is not None}
    assert kept == pytest.approx(recorded[4].processor_seconds, abs=0.01)
    assert kept > 0
    summary = train(config, tmp_path / "run", resume=True)
    steps = [one for one in read_metrics(tmp_path / "run" / "metrics.jsonl") if one.loss is not None]
    used = [one.processor_seconds or 0.0 for one in steps]
    assert [one.step for one in steps] == list(range(1, summary.steps + 1))
    assert used == sorted(used)
    assert kept < used[4] < kept + 0.4
    assert used[-2] < 0.5 <= used[-1]
    # The first rate after the checkpoint is the one that the interrupted run would have taken.
    assert steps[4].learning_rate == recorded[5].learning_rate
