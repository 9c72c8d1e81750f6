"""Compares predicted with measured steps: the cost model of `varifocal plan` on this machine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from varifocal.bench.model.contenders import Contender, build, share_weights
from varifocal.bench.model.run import Plan as ModelPlan
from varifocal.bench.model.run import tokens, vocabulary_of
from varifocal.bench.plan.calibration import calibrate
from varifocal.bench.rows import rows_of_ours
from varifocal.bench.timing import Times, take_turns
from varifocal.device import CPU, Device
from varifocal.environment import environment
from varifocal.memory import in_own_process
from varifocal.model import PRESETS
from varifocal.model import preset as preset_config
from varifocal.model.config import VarifocalConfig
from varifocal.plan.plan import Prediction, Training, predict
from varifocal.results.hardware import Hardware
from varifocal.results.plan_check import PlanCheck, PlanRow

LONG_ROUND = 15.0
"""Seconds that all rounds of a length may take; there is always at least one round."""
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}
"""Makes the C library return memory at once, so that a process is as large as its tensors."""


@dataclass(frozen=True, kw_only=True)
class CheckPlan:
    """What to compare."""

    presets: tuple[str, ...] = ("tiny", "small", "qwen-134m")
    lengths: tuple[int, ...] = (256, 1024, 2048)
    names: tuple[str, ...] = ("dense", "local", "head_gated", "context_adaptive exact")
    """Contenders of `varifocal bench model`."""
    rounds: int = 3
    memory: bool = True

    def __post_init__(self) -> None:
        for name in self.presets:
            if name not in PRESETS:
                raise ValueError(f"unknown preset {name!r}; known are {', '.join(PRESETS)}")
        for name in self.names:
            if name not in rows_of_ours():
                raise ValueError(f"unknown contender {name!r}; known are {', '.join(rows_of_ours())}")

    @property
    def context(self) -> int:
        """The context that the mechanisms' options are scaled to."""
        return max(self.lengths)


def bench_plan(
    check: CheckPlan,
    *,
    clock: Device = CPU,
    on_step: Callable[[str], None] | None = None,
    on_rows: Callable[[PlanCheck], None] | None = None,
) -> PlanCheck:
    """The result: environment, the machine's rates, and a row for each preset, length and mechanism.

    `on_rows` is called with the result so far whenever rows were added.
    """
    say = on_step or (lambda doing: None)
    say("measuring rates")
    found = PlanCheck(
        environment=environment(),
        context=check.context,
        clock="wall" if clock is CPU else "processor",
        machine=calibrate(clock=clock),
        rows=(),
    )
    for preset in check.presets:
        contenders = [build(name, preset, context=check.context) for name in check.names]
        shared = share_weights(contenders)
        for length in check.lengths:
            say(f"steps of {preset}, {length} tokens")
            told = sum(predicted_step(one.model.config, length, found.machine).step_seconds for one in contenders)
            rounds = max(1, min(check.rounds, int(LONG_ROUND / told)))
            timed = time_steps(contenders, shared, tokens(ModelPlan(preset=preset), length), rounds=rounds, clock=clock)
            fresh = [
                PlanRow(
                    preset=preset,
                    length=length,
                    name=name,
                    seconds=times.median,
                    spread=times.spread,
                    rounds=rounds,
                    peak_bytes=None,
                )
                for name, times in timed.items()
            ]
            found = with_predictions(replace(found, rows=(*found.rows, *fresh)))
            if on_rows is not None:
                on_rows(found)
        del contenders, shared
    return with_memory(found, on_step=on_step) if check.memory else found


def measure_memory_of(file: Path, *, on_step: Callable[[str], None] | None = None) -> PlanCheck:
    """Add the peak memory to the rows of a result file that have none, and predict all rows again."""
    found = with_memory(with_predictions(PlanCheck.read(file)), on_step=on_step)
    found.write(file)
    return found


def time_steps(
    contenders: list[Contender], shared: list[torch.nn.Parameter], ids: Tensor, *, rounds: int, clock: Device
) -> dict[str, Times]:
    """Time forward, backward and a step of AdamW; all take turns after a step on a few tokens to warm up."""
    optimizer = torch.optim.AdamW(shared, lr=1e-5, fused=True)

    def step(contender: Contender, text: Tensor) -> None:
        contender.loss(text).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for contender in contenders:
        step(contender, ids[:, :16])
    runs = {one.name: functools.partial(step, one, ids) for one in contenders}
    return take_turns(runs, rounds=rounds, device=clock, warm_up=False)


def predicted_step(config: VarifocalConfig, length: int, machine: Hardware) -> Prediction:
    """The cost model's prediction for a step on one row."""
    training = Training(config=config, tokens=length, length=length, batch=1, micro_batch=1, precision="float32")
    return predict(training, machine)


def with_predictions(check: PlanCheck) -> PlanCheck:
    """The result with the cost model's prediction for every row, at the rates that were measured with them."""
    rows = []
    for row in check.rows:
        mechanism, options = rows_of_ours()[row.name]
        config = preset_config(
            row.preset, mechanism=mechanism, mechanism_options=options, max_position_embeddings=check.context
        )
        told = predicted_step(config, row.length, check.machine)
        rows.append(
            replace(
                row,
                predicted_seconds=told.step_seconds,
                predicted_parts=told.seconds,
                predicted_bytes=told.peak,
                predicted_memory=told.memory,
            )
        )
    return replace(check, rows=tuple(rows))


def with_memory(check: PlanCheck, *, on_step: Callable[[str], None] | None = None) -> PlanCheck:
    """The result with the peak memory of every row; missing ones are measured, one process for each preset."""
    rows = list(check.rows)
    for preset in dict.fromkeys(row.preset for row in rows if row.peak_bytes is None):
        if on_step is not None:
            on_step(f"memory of {preset}")
        places = [place for place, row in enumerate(rows) if row.preset == preset and row.peak_bytes is None]
        task: dict[str, object] = {
            "preset": preset,
            "context": check.context,
            "vocabulary": vocabulary_of(ModelPlan(preset=preset)),
            "threads": torch.get_num_threads(),
            "steps": [[rows[place].name, rows[place].length] for place in places],
        }
        answer = in_own_process("varifocal.bench.plan.memory_probe", task, timeout=3600, environment=GIVE_BACK)
        peaks = answer["peak_bytes"]
        assert isinstance(peaks, list)
        for place, peak in zip(places, peaks, strict=True):
            rows[place] = replace(rows[place], peak_bytes=int(peak))
    return replace(check, rows=tuple(rows))
