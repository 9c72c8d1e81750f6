"""The process in which one model's memory is measured: it reads a task as JSON and writes the peak as JSON."""

from __future__ import annotations

import json
import sys

import torch

from varifocal.bench.model.contenders import build
from varifocal.device import find_device


def main() -> None:
    """Measure all that training takes beyond the libraries: weights, gradients, optimizer, activations."""
    task = json.load(sys.stdin)
    torch.set_num_threads(task["threads"])
    device = find_device(task["device"])

    def train() -> None:
        contender = build(
            task["name"],
            task["preset"],
            context=task["context"],
            layers=task["layers"],
            device=device.place,
            precision=task["precision"],
        )
        optimizer = torch.optim.AdamW(contender.model.parameters(), lr=1e-5, fused=True)
        # The first step allocates gradients and the optimizer's state; a short text is enough for that.
        for length in (64, task["length"]):
            ids = torch.randint(0, task["vocabulary"], (task["batch"], length), device=device.place)
            contender.loss(ids).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    sys.stdout.write(json.dumps({"peak_bytes": device.peak_additional_bytes(train)}) + "\n")


if __name__ == "__main__":
    main()
