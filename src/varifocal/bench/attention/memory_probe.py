"""The process in which one contender's memory is measured: it reads a task as JSON and writes the peak as JSON."""

from __future__ import annotations

import json
import sys

import torch

from varifocal.bench.attention.contenders import contenders
from varifocal.bench.attention.run import one_run
from varifocal.bench.attention.workload import Workload, make_inputs
from varifocal.device import find_device, find_dtype


def main() -> None:
    """Warm up on a short text, so that libraries are loaded and thread pools are running, then measure one run."""
    task = json.load(sys.stdin)
    torch.set_num_threads(task["threads"])
    sizes = task["workload"]
    work = Workload(**(sizes | {"dtype": find_dtype(sizes["dtype"]), "device": torch.device(sizes["device"])}))
    entrant = contenders(work)[task["name"]]
    short = Workload(**(vars(work) | {"length": min(128, work.length)}))
    one_run(entrant, task["pass"], make_inputs(short))()
    inputs = make_inputs(work)
    run = one_run(entrant, task["pass"], inputs)
    sys.stdout.write(json.dumps({"peak_bytes": find_device(work.device).peak_additional_bytes(run)}) + "\n")


if __name__ == "__main__":
    main()
