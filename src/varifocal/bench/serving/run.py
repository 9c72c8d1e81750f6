"""Runs the benchmark: vLLM serves each contender in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from varifocal.bench.step import Step
from varifocal.environment import environment
from varifocal.memory import in_own_process
from varifocal.model.checkpoints import read_config
from varifocal.results.serving_bench import ServingBench, ServingCapacity, ServingRow

PROBE = "varifocal.bench.serving.engine_probe"
SETTINGS = ("limited", "room")
DTYPES = {"float32": 4, "bfloat16": 2}
"""Bytes of a number."""
OnStep = Callable[[Step], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure."""

    folders: tuple[Path, ...]
    """Saved models; ratios are to the first."""
    python: str | None = None
    """An interpreter that has vLLM; None for this one."""
    context: int = 8192
    """Tokens of a text, where it is counted what fits."""
    cache_bytes: int = 1 << 30
    """What it is counted in."""
    requests: int = 16
    prompt: int = 1536
    new_tokens: int = 512
    held: int = 4
    """Requests of the first contender whose keys and values fit into the small cache."""
    dtype: str = "float32"
    block: int = 32
    chunk: int = 256

    def __post_init__(self) -> None:
        for what in ("context", "cache_bytes", "requests", "prompt", "new_tokens", "held", "block", "chunk"):
            if getattr(self, what) < 1:
                raise ValueError(f"{what} must be at least 1, got {getattr(self, what)}")
        names = [folder.name for folder in self.folders]
        if len(set(names)) < len(names) or not names:
            raise ValueError(f"each model needs a folder with a name of its own, got {', '.join(names) or 'none'}")
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}; known are {', '.join(DTYPES)}")
        if self.python is None and find_spec("vllm") is None:
            raise ValueError("vLLM is not installed here; name an interpreter that has it with --python")

    @property
    def limited_bytes(self) -> int:
        """The small cache: it holds `held` requests with every key head of the first contender, and a block more."""
        config = read_config(self.folders[0])
        token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * DTYPES[self.dtype]
        length = self.prompt + self.new_tokens
        blocks = self.held * -(-length // self.block) + 1
        return int(token * self.block * blocks)


def bench_serving(plan: Plan, *, on_step: OnStep = lambda step: None) -> ServingBench:
    """The result: what fits and a row for each contender and setting."""
    capacities: list[ServingCapacity] = []
    rows: list[ServingRow] = []
    engine, limited = "", plan.limited_bytes
    total = len(plan.folders) * len(SETTINGS)
    for folder in plan.folders:
        size = limited
        for setting in SETTINGS:
            on_step(Step(len(rows), total, f"serving {folder.name}: {setting}"))
            found = measured(plan, folder, size)
            row = ServingRow(
                name=folder.name, setting=setting, ratio=1.0,
                requests_per_second=plan.requests / found["row"]["seconds"], **found["row"],
            )  # fmt: skip
            rows.append(row)
            engine, size = found["engine"], found["room_bytes"]
        capacities.append(ServingCapacity(name=folder.name, ratio=1.0, **found["capacity"]))
    return ServingBench(
        environment=environment(), engine=engine, dtype=plan.dtype, context=plan.context,
        cache_bytes=plan.cache_bytes, requests=plan.requests, prompt=plan.prompt, new_tokens=plan.new_tokens,
        block=plan.block, chunk=plan.chunk,
        capacities=tuple(replace(one, ratio=one.tokens / capacities[0].tokens) for one in capacities),
        rows=tuple(in_ratios(rows)),
    )  # fmt: skip


def measured(plan: Plan, folder: Path, size: int) -> dict[str, Any]:
    """vLLM's figures of one contender with so many bytes of cache."""
    task: dict[str, object] = {
        "folder": str(folder.resolve()), "threads": torch.get_num_threads(), "context": plan.context,
        "cache_bytes": plan.cache_bytes, "engine_bytes": size, "requests": plan.requests, "prompt": plan.prompt,
        "new_tokens": plan.new_tokens, "dtype": plan.dtype, "block": plan.block, "chunk": plan.chunk,
    }  # fmt: skip
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }  # fmt: skip
    try:
        return in_own_process(PROBE, task, timeout=7200, environment=settings, python=plan.python)
    except ValueError as error:
        raise ValueError(f"vLLM does not serve {folder}: {error}") from error


def in_ratios(rows: list[ServingRow]) -> list[ServingRow]:
    """The rows by setting, each with its ratio to the first of its setting."""
    found = []
    for setting in reversed(SETTINGS):
        own = [row for row in rows if row.setting == setting]
        found += [replace(row, ratio=row.requests_per_second / own[0].requests_per_second) for row in own]
    return found
