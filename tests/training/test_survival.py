"""A run that is killed and resumed gives what it would have given; checkpoints are whole or skipped by name."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.processes import PATIENCE
from tests.training.runs import records, said_file, small_config, start_training, wait_for_step
from varifocal.data import PreparedData
from varifocal.training.checkpoints import checkpoint_paths
from varifocal.training.config import TrainingConfig
from varifocal.training.run import train
from varifocal.training.trainer import Progress

LONG = {"steps": 60, "batch": 4, "micro_batch": 2, "length": 64, "learning_rate": 0.01}


def written(config: TrainingConfig, path: Path) -> Path:
    path.write_text(config.as_toml(), encoding="utf-8")
    return path


def test_killed_at_random_steps_and_resumed_gives_the_same_losses_bit_by_bit(
    probe: PreparedData, tmp_path: Path
) -> None:
    config = small_config(probe, "context_adaptive", optimization=LONG, validation={"every": 7})
    train(config, tmp_path / "whole")
    generator, step = random.Random(os.urandom(8)), 0
    for resume in ([], ["--resume"]):
        step += generator.randint(2, 10)
        process = start_training(written(config, tmp_path / "config.toml"), tmp_path / "killed", *resume)
        wait_for_step(process, tmp_path / "killed", step)
        time.sleep(generator.uniform(0, 0.05))
        process.kill()
        process.wait()
        assert not (tmp_path / "killed" / "summary.json").exists()
    train(config, tmp_path / "killed", resume=True)
    assert records(tmp_path / "killed") == records(tmp_path / "whole")
    saved = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("killed", "whole")]
    assert saved[0] == saved[1]
    assert [path.name for path in (tmp_path / "killed" / "checkpoints").iterdir() if path.name.startswith(".")] == []


def test_sigterm_writes_a_checkpoint_first(probe: PreparedData, tmp_path: Path) -> None:
    config = small_config(probe, optimization=LONG | {"steps": 100_000}, checkpoints={"every": 100_000})
    process = start_training(written(config, tmp_path / "config.toml"), tmp_path / "run")
    wait_for_step(process, tmp_path / "run", 5)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=PATIENCE)
    words = said_file(tmp_path / "run").read_text(encoding="utf-8")
    assert process.returncode == 143, words
    ((step, path),) = checkpoint_paths(tmp_path / "run" / "checkpoints")
    assert step == records(tmp_path / "run")[-1]["step"]
    assert f"stopped at step {step} of 100000" in words
    assert str(path) in words


def stopped_run(probe: PreparedData, out: Path) -> TrainingConfig:
    """A run that somebody stopped after step 6, with checkpoints of steps 4 and 6."""
    config = small_config(probe)

    def interrupt(now: Progress) -> None:
        if now.step == 6 and now.loss is not None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, out, on_progress=interrupt)
    return config


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "optimizer.pt").write_bytes(b"x"), "optimizer.pt has 1 bytes where"),
        (lambda path: flip(path / "model.safetensors"), "the checksum of model.safetensors differs"),
        (lambda path: (path / "trainer_state.json").unlink(), "trainer_state.json is missing"),
        (lambda path: (path / "complete.json").write_text("{"), "complete.json cannot be read"),
    ],
)
def test_damaged_checkpoint_is_named_and_skipped(probe: PreparedData, tmp_path: Path, damage, words: str) -> None:  # type: ignore[no-untyped-def]
    config = stopped_run(probe, tmp_path / "run")
    damage(tmp_path / "run" / "checkpoints" / "step-4")
    notes: list[str] = []
    train(config, tmp_path / "run", resume=True, on_progress=lambda now: notes.append(now.note) if now.note else None)
    assert words in notes[0]
    assert "step-4" in notes[0]
    assert notes[1] == "going on from step 2"
    train(config, tmp_path / "whole")
    assert records(tmp_path / "run") == records(tmp_path / "whole")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_only_damaged_checkpoints_is_an_error(probe: PreparedData, tmp_path: Path) -> None:
    config = stopped_run(probe, tmp_path / "run")
    for _, path in checkpoint_paths(tmp_path / "run" / "checkpoints"):
        (path / "complete.json").unlink()
    with pytest.raises(ValueError, match=r"none of the 2 checkpoints .* is whole"):
        train(config, tmp_path / "run", resume=True)


def test_run_killed_before_its_first_checkpoint_begins_anew(probe: PreparedData, tmp_path: Path) -> None:
    config = small_config(probe, checkpoints={"every": 1000})

    def interrupt(now: Progress) -> None:
        if now.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", on_progress=interrupt)
    train(config, tmp_path / "run", resume=True)
    assert [one["step"] for one in records(tmp_path / "run") if "loss" in one] == list(range(1, 9))
