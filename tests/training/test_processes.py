"""Two processes under torchrun do what one does, also when one of them is killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes import PATIENCE
from tests.training.runs import losses, said_file, small_config, start_training
from varifocal.data import PreparedData
from varifocal.training.run import train
from varifocal.training.trainer import Progress


def test_two_processes_equal_one_also_when_one_of_them_was_killed(probe: PreparedData, tmp_path: Path) -> None:
    # Sums in another order differ in their last bits, and AdamW makes much of them once gradients are small: few steps.
    config = small_config(probe, optimization={"steps": 12, "micro_batch": 1, "learning_rate": 1e-3})
    train(config, tmp_path / "one")
    (tmp_path / "config.toml").write_text(config.as_toml(), encoding="utf-8")
    two = ("--nproc-per-node", "2")
    process = start_training(tmp_path / "config.toml", tmp_path / "two", torchrun=two, dies=(1, 5))
    assert process.wait(timeout=PATIENCE) != 0
    assert not (tmp_path / "two" / "summary.json").exists()
    process = start_training(tmp_path / "config.toml", tmp_path / "two", "--resume", torchrun=two)
    process.wait(timeout=PATIENCE)
    words = said_file(tmp_path / "two").read_text(encoding="utf-8")
    assert process.returncode == 0, words[-3000:]
    assert words.count("going on from step") == 1
    assert words.count("finished: validation loss") == 1
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-6)
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("one", "two")]
    assert summaries[1]["validation_loss"] == pytest.approx(summaries[0]["validation_loss"], abs=1e-6)
    assert summaries[1]["processes"] == 2


def test_restart_by_torchrun_goes_on_with_the_run(
    probe: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(probe)

    def interrupt(now: Progress) -> None:
        if now.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", on_progress=interrupt)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train(config, tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 8
