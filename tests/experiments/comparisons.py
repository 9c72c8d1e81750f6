"""Small comparisons for the tests: a model of a few thousand parameters on a probe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from varifocal.data.probe import Probe, make_probe
from varifocal.experiments.comparison import OnProgress
from varifocal.experiments.comparison_plan import Arm, ComparisonPlan
from varifocal.training.config import TrainingConfig, config_from
from varifocal.training.run import train

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 16,
}
PROBE = Probe(length=64, questions=4, distances=(4, 32), keys=8, values=4, noise=8)


def small_probe(folder: Path) -> Path:
    make_probe(folder / "probe", PROBE, texts=200)
    return folder / "probe"


def small_base(data: Path, **optimization: Any) -> TrainingConfig:
    return config_from({
        "data": {"path": str(data)},
        "model": {"preset": "tiny", "overrides": SIZES},
        "optimization": {"steps": 3, "batch": 4, "length": 64, **optimization},
        "validation": {"every": 2, "tokens": 256, "trace_rows": 1},
        "run": {"threads": 1},
    })  # fmt: skip


def small_plan(data: Path, *names: str, arms: tuple[Arm, ...] = (), **given: Any) -> ComparisonPlan:
    named = tuple(Arm(name=name, mechanism=name) for name in names or ("dense",))
    whole: dict[str, Any] = {"title": "small", "base": small_base(data), "arms": (*named, *arms)} | given
    return ComparisonPlan(**whole)


class TrainHere:
    """Trains cells in this process, with the real training, and remembers which."""

    def __init__(self) -> None:
        self.trained: list[str] = []

    def __call__(self, configs: dict[str, TrainingConfig], out: Path, say: OnProgress) -> dict[str, str]:
        for name, config in configs.items():
            run = out / "cells" / name
            train(config, run, resume=(run / "config.toml").is_file())
            self.trained.append(name)
        return {}
