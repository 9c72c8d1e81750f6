"""Steps of `varifocal train` and bare steps of the same model take turns in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from varifocal.bench.data.synthetic import write_synthetic
from varifocal.bench.timing import Times
from varifocal.data import PackedRows, PreparedData
from varifocal.environment import environment
from varifocal.model import PRESETS
from varifocal.results.training_bench import TrainingBench
from varifocal.training.config import (
    CheckpointsSection,
    DataSection,
    ModelSection,
    OptimizationSection,
    RunSection,
    TrainingConfig,
    ValidationSection,
)
from varifocal.training.micro_batches import model_inputs
from varifocal.training.run import train
from varifocal.training.start import starting_model
from varifocal.training.trainer import Progress

WARM_UP = 2
"""Steps of each kind that are not counted."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to train, and for how long."""

    preset: str = "tiny"
    mechanism: str = "head_gated"
    batch: int = 8
    length: int = 512
    steps: int = 30
    """Steps of each kind that are counted."""

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ValueError(f"unknown preset {self.preset!r}; known are {', '.join(PRESETS)}")

    def config(self, data: Path) -> TrainingConfig:
        """The run that is measured; validation and checkpoints, which are not part of a step, come at its end."""
        steps = self.steps + WARM_UP
        return TrainingConfig(
            data=DataSection(path=str(data)),
            model=ModelSection(
                preset=self.preset,
                mechanism=self.mechanism,
                overrides={"vocab_size": PRESETS[self.preset].vocabulary},
            ),
            optimization=OptimizationSection(steps=steps, batch=self.batch, length=self.length, learning_rate=1e-4),
            validation=ValidationSection(every=steps, tokens=self.length),
            checkpoints=CheckpointsSection(every=steps, keep=1),
            run=RunSection(threads=torch.get_num_threads()),
        )


def bench_training(plan: Plan, *, on_step: Callable[[int, int], None] | None = None) -> TrainingBench:
    """The result: the seconds of a bare step and of a step of the training loop, and their ratio."""
    with TemporaryDirectory() as folder:
        data = write_synthetic(
            Path(folder) / "data",
            tokens=plan.length * plan.batch * (plan.steps + WARM_UP + 1),
            validation=4 * plan.length,
        )
        config = plan.config(data.folder)
        bare = bare_step(config, data)
        loop_seconds: list[float] = []
        bare_seconds: list[float] = []
        mark = time.perf_counter()

        def turn(progress: Progress) -> None:
            nonlocal mark
            # The first step also sets everything up; the last call, after the validation, belongs to no step.
            if progress.loss is None or len(loop_seconds) == plan.steps + WARM_UP:
                return
            loop_seconds.append(time.perf_counter() - mark)
            begin = time.perf_counter()
            bare(progress.step)
            bare_seconds.append(time.perf_counter() - begin)
            if on_step is not None:
                on_step(progress.step, plan.steps + WARM_UP)
            mark = time.perf_counter()

        train(config, Path(folder) / "run", on_progress=turn)
    loop, alone = (Times(tuple(seconds[WARM_UP:])) for seconds in (loop_seconds, bare_seconds))
    return TrainingBench(
        environment=environment(),
        preset=plan.preset,
        mechanism=plan.mechanism,
        batch=plan.batch,
        length=plan.length,
        steps=len(alone.seconds),
        bare_seconds=alone.median,
        bare_spread=alone.spread,
        loop_seconds=loop.median,
        loop_spread=loop.spread,
        loop_over_bare=1 / alone.speedup_of(loop),
    )


def bare_step(config: TrainingConfig, data: PreparedData) -> Callable[[int], None]:
    """Forward, backward and AdamW on rows that were read beforehand: what `varifocal bench model` times."""
    model = starting_model(config, data)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rows: PackedRows = data.split("train").rows(length=config.optimization.length)
    inputs = model_inputs(rows, range(config.optimization.batch))

    def run(step: int) -> None:
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run
