"""Predicted and measured steps side by side: the cost model of `varifocal plan` on this machine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

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
from varifocal.model import preset as preset_config
from varifocal.model.config import VarifocalConfig
from varifocal.plan.hardware import Hardware
from varifocal.plan.plan import Prediction, Training, predict

LONG_ROUND = 15.0
"""Seconds that all rounds of a length may take; there is always one."""
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}
"""Lets the C library return memory at once, so that a process's size is what its tensors take."""


@dataclass(frozen=True, kw_only=True)
class PlanCheck:
    """What to compare."""

    presets: tuple[str, ...] = ("tiny", "small", "qwen-134m")
    lengths: tuple[int, ...] = (256, 1024, 2048)
    names: tuple[str, ...] = ("dense", "local", "head_gated", "context_adaptive exact")
    """Contenders of `varifocal bench model`."""
    rounds: int = 3
    memory: bool = True

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in rows_of_ours():
                raise ValueError(f"unknown contender {name!r}; here are: {', '.join(rows_of_ours())}")

    @property
    def context(self) -> int:
        """What the mechanisms' options are scaled to."""
        return max(self.lengths)


def bench_plan(
    check: PlanCheck,
    *,
    clock: Device = CPU,
    on_step: Callable[[str], None] | None = None,
    on_rows: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """The result file's content: environment, the machine's rates, and a row for each preset, length and mechanism.

    `on_rows` gets all that there is whenever rows were added.
    """
    say = on_step or (lambda doing: None)
    say("measuring rates")
    content: dict[str, Any] = {
        "benchmark": "plan",
        "environment": environment(),
        "context": check.context,
        "clock": "wall" if clock is CPU else "processor",
        "machine": asdict(calibrate(clock=clock)),
        "rows": [],
    }
    machine = Hardware(**content["machine"])
    for preset in check.presets:
        contenders = [build(name, preset, context=check.context) for name in check.names]
        shared = share_weights(contenders)
        for length in check.lengths:
            say(f"steps of {preset}, {length} tokens")
            told = sum(predicted_step(one.model.config, length, machine).step_seconds for one in contenders)
            rounds = max(1, min(check.rounds, int(LONG_ROUND / told)))
            timed = time_steps(contenders, shared, tokens(ModelPlan(preset=preset), length), rounds=rounds, clock=clock)
            content["rows"] += [
                {
                    "preset": preset,
                    "length": length,
                    "name": name,
                    "seconds": times.median,
                    "spread": times.spread,
                    "rounds": rounds,
                    "peak_bytes": None,
                }
                for name, times in timed.items()
            ]
            add_predictions(content)
            if on_rows is not None:
                on_rows(content)
        del contenders, shared
    if check.memory:
        add_memory(content, on_step=on_step)
    return content


def time_steps(
    contenders: list[Contender], shared: list[torch.nn.Parameter], ids: Tensor, *, rounds: int, clock: Device
) -> dict[str, Times]:
    """Forward, backward and a step of AdamW, all taking turns after a step on a few tokens to warm up."""
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
    """What the cost model says of a step on one row."""
    training = Training(config=config, tokens=length, length=length, batch=1, micro_batch=1, precision="float32")
    return predict(training, machine)


def add_predictions(content: dict[str, Any]) -> None:
    """What the cost model says of every row, at the rates that were measured with them."""
    machine = Hardware(**content["machine"])
    for row in content["rows"]:
        mechanism, options = rows_of_ours()[row["name"]]
        config = preset_config(
            row["preset"],
            mechanism=mechanism,
            mechanism_options=options,
            max_position_embeddings=content["context"],
        )
        told = predicted_step(config, row["length"], machine)
        row |= {
            "predicted_seconds": told.step_seconds,
            "predicted_parts": told.seconds,
            "predicted_bytes": told.peak,
            "predicted_memory": told.memory,
        }


def add_memory(content: dict[str, Any], *, on_step: Callable[[str], None] | None = None) -> None:
    """Measure the peak memory of every row that has none yet, all rows of a preset in a process of their own."""
    for preset in dict.fromkeys(row["preset"] for row in content["rows"] if row["peak_bytes"] is None):
        if on_step is not None:
            on_step(f"memory of {preset}")
        rows = [row for row in content["rows"] if row["preset"] == preset and row["peak_bytes"] is None]
        task: dict[str, object] = {
            "preset": preset,
            "context": content["context"],
            "vocabulary": vocabulary_of(ModelPlan(preset=preset)),
            "threads": torch.get_num_threads(),
            "steps": [[row["name"], row["length"]] for row in rows],
        }
        answer = in_own_process("varifocal.bench.plan.memory_probe", task, timeout=3600, environment=GIVE_BACK)
        peaks = answer["peak_bytes"]
        assert isinstance(peaks, list)
        for row, peak in zip(rows, peaks, strict=True):
            row["peak_bytes"] = int(peak)
