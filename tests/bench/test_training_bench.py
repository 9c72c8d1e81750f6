"""The benchmark of the training loop: what it counts and what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.test_cli import varifocal
from varifocal.bench.training.run import Plan, bench_training


def test_every_counted_step_of_the_loop_has_a_bare_one_beside_it() -> None:
    seen: list[tuple[int, int]] = []
    found = bench_training(
        Plan(batch=1, length=32, steps=3, mechanism="local"), on_step=lambda done, total: seen.append((done, total))
    )
    assert seen == [(step, 5) for step in range(1, 6)]
    assert found.steps == 3
    assert found.loop_over_bare > 0
    assert found.bare_seconds > 0


def test_unknown_preset_is_named() -> None:
    with pytest.raises(ValueError, match="unknown preset 'big'; known are"):
        Plan(preset="big")


def test_command_prints_and_writes_the_ratio(tmp_path: Path) -> None:
    result = varifocal(
        *("bench", "training", "--batch", "1", "--length", "32", "--steps", "2", "--json", str(tmp_path / "r.json"))
    )
    assert result.returncode == 0, result.stderr
    content = json.loads((tmp_path / "r.json").read_text())
    assert f"{100 * (content['loop_over_bare'] - 1):+.1f} %" in result.stdout
