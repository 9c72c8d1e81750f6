"""Runs small enough for a test, and processes that train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from varifocal.data import PreparedData
from varifocal.training.config import TrainingConfig, config_from

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "dense": {},
    "head_gated": {"window": 8, "gate": {"z_loss": 0.01}},
    "context_adaptive": {"window_min": 8, "window_max": 16, "edge": 4},
    "dynamic_sparse": {"rank": 4},
    "sparse_geometric": {"hidden": 4},
}


DYING = """
import os, signal
from varifocal.training.trainer import RunTrainer

whole = RunTrainer.log


def log(self, *arguments, **options):
    whole(self, *arguments, **options)
    if os.environ["RANK"] == "{rank}" and self.state.global_step == {step}:
        os.kill(os.getpid(), signal.SIGKILL)


RunTrainer.log = log
"""


def small_content(data: PreparedData | Path, mechanism: str = "head_gated", /, **sections: dict[str, Any]) -> Any:
    """A config as plain values: 8 steps of 4 rows of 64 tokens; `sections` are laid over it."""
    path = data.folder if isinstance(data, PreparedData) else data
    content: dict[str, dict[str, Any]] = {
        "data": {"path": str(path)},
        "model": {"mechanism": mechanism, "mechanism_options": OPTIONS[mechanism], "overrides": SIZES},
        "optimization": {"steps": 8, "batch": 4, "micro_batch": 2, "length": 64, "learning_rate": 0.01},
        "validation": {"every": 4, "tokens": 320, "trace_rows": 2},
        "checkpoints": {"every": 2},
        "run": {"seed": 3, "threads": 1},
    }
    for name, values in sections.items():
        content[name] = content.get(name, {}) | values
    return content


def small_config(
    data: PreparedData | Path, mechanism: str = "head_gated", /, **sections: dict[str, Any]
) -> TrainingConfig:
    return config_from(small_content(data, mechanism, **sections))


def records(out: Path) -> list[dict[str, Any]]:
    """What a run recorded, without what a clock says."""
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    clock = ("seconds", "processor_seconds", "tokens_per_second")
    return [{name: value for name, value in json.loads(line).items() if name not in clock} for line in lines]


def losses(out: Path) -> list[float]:
    return [record["loss"] for record in records(out) if "loss" in record]


def start_training(
    config: Path, out: Path, *options: str, torchrun: tuple[str, ...] = (), dies: tuple[int, int] | None = None
) -> subprocess.Popen[bytes]:
    """A process of its own, or torchrun's, that trains; what it says goes to a file beside `out`.

    With `dies`, the process of that rank is killed at the end of that step: by itself, for whoever watches it may come
    too late.
    """
    program = "import sys; from varifocal.cli.main import run; sys.argv[0] = 'varifocal'; run()"
    if dies is not None:
        program = DYING.format(rank=dies[0], step=dies[1]) + program
    command = [sys.executable, "-c", program, "train", str(config), str(out), *options]
    if torchrun:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", *torchrun]
        command = [*launcher, *command]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    with said_file(out).open("wb") as said:
        return subprocess.Popen(command, stdout=said, stderr=said, env=environment, start_new_session=True)


def said_file(out: Path) -> Path:
    return out.with_name(f"{out.name}.log")


def wait_for_step(process: subprocess.Popen[bytes], out: Path, step: int) -> None:
    """Until the run has recorded a step; fails with the process's words if it ends before."""
    metrics = out / "metrics.jsonl"
    while process.poll() is None:
        if metrics.is_file() and f'"step": {step},' in metrics.read_text(encoding="utf-8"):
            return
        time.sleep(0.002)
    words = said_file(out).read_text(encoding="utf-8")
    raise AssertionError(f"training ended with {process.returncode} before step {step}: {words[-2000:]}")
