"""Writes what the project computes now: `python -m tests.golden.record tests/golden/values.json`.

With --hashes it writes the SHA-256 of every tensor instead. Two commits that give equal files on one machine compute
the same, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tests.golden import models
from tests.golden.fingerprints import fingerprint, hashed
from tests.golden.records import COMPUTATIONS, disagreements

MARGIN = 1e-3
"""The least lead of a token over the second best; logits differ by some 1e-5 between processors."""
JITTER = 1e-7
"""About one rounding of every parameter."""


def computed() -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The tensors of every case; those that the native backend refuses are passed over."""
    for name, compute in COMPUTATIONS.items():
        try:
            tensors = compute()
        except ValueError:
            if not name.startswith("attend/native/"):
                raise
            continue
        for label, tensor in tensors.items():
            assert not bool(tensor.isnan().any()), f"{name}: {label} has NaNs"
        yield name, tensors


def check_decisions(values: dict[str, dict[str, object]]) -> None:
    """Every token and selected key of the models is decided clearly enough for other processors to agree."""
    for variant in models.VARIANTS:
        margin = models.smallest_margin(variant)
        assert margin > MARGIN, f"{variant} decides by {margin:.1e}; draw other prompts"
    for jitter in (JITTER, -JITTER):
        for name, compute in models.computations(jitter=jitter).items():
            found = {label: fingerprint(tensor) for label, tensor in compute().items()}
            differing = disagreements(name, found, values[name])
            assert not differing, f"{name} hangs on roundings; draw other texts: {differing}"


def as_lines(entries: dict[str, object]) -> str:
    """A JSON object with one line for each entry."""
    lines = (f"{json.dumps(name)}: {json.dumps(entry, separators=(',', ':'))}" for name, entry in entries.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    """Write the values or hashes beside the file, then put them in its place."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.record", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--hashes", action="store_true", help="the SHA-256 of every tensor, not its fingerprint")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    entries: dict[str, object]
    if arguments.hashes:
        entries = {f"{name}: {label}": hashed(one) for name, found in computed() for label, one in found.items()}
    else:
        values = {name: {label: fingerprint(one) for label, one in found.items()} for name, found in computed()}
        check_decisions(values)
        entries = dict(values)
    beside = arguments.file.with_name(arguments.file.name + ".part")
    beside.write_text(as_lines(entries), encoding="utf-8")
    os.replace(beside, arguments.file)


if __name__ == "__main__":
    main()
