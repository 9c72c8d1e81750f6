"""The process in which a preset's memory is measured: it reads steps as JSON and writes their peaks as JSON."""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import torch

from varifocal.bench.model.contenders import build
from varifocal.device import CPU


def main() -> None:
    """Measure one step after another; the C library returns memory at once, so that all start from the same size."""
    task = json.load(sys.stdin)
    torch.set_num_threads(task["threads"])
    run_step(task, name=task["steps"][0][0], length=16)
    peaks = [
        CPU.peak_additional_bytes(functools.partial(run_step, task, name=name, length=length))
        for name, length in task["steps"]
    ]
    sys.stdout.write(json.dumps({"peak_bytes": peaks}) + "\n")


def run_step(task: dict[str, Any], *, name: str, length: int) -> None:
    """Build a model and take two steps; the first, on a short text, allocates the optimizer's state."""
    contender = build(name, task["preset"], context=task["context"])
    optimizer = torch.optim.AdamW(contender.model.parameters(), lr=1e-5, fused=True)
    for size in (16, length):
        ids = torch.randint(0, task["vocabulary"], (1, size))
        contender.loss(ids).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
