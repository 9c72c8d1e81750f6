"""gates.npz: what gates, widths and selections did at each validation of a run."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from varifocal.results.files import write_whole

GATES = "gates.npz"
Traces = dict[str, NDArray[Any]]
""""step" [N], the others [N, L, H] or [N, L, H, D]."""


def read_gate_traces(path: Path) -> Traces:
    """The arrays of the file, or none if it does not exist; ValueError if it is something else."""
    if not path.is_file():
        return {}
    try:
        with numpy.load(path, allow_pickle=False) as content:
            traces = {name: content[name] for name in content.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zipfile.LargeZipFile) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"cannot read {path}: {reason}") from error
    steps = traces.get("step")
    if steps is None or steps.ndim != 1:
        raise ValueError(f"cannot read {path}: it has no steps")
    if not len(steps):
        return {}
    for name, one in traces.items():
        if name != "step" and (
            one.ndim < 3 or one.shape[0] != len(steps) or not numpy.issubdtype(one.dtype, numpy.number)
        ):
            raise ValueError(
                f"cannot read {path}: its array {name!r} has shape {one.shape}, expected validations, layers and heads"
            )
    return traces


def write_gate_traces(path: Path, traces: Traces) -> None:
    """Write the file whole, or leave it as it was."""
    content = io.BytesIO()
    numpy.savez_compressed(content, allow_pickle=False, **traces)
    write_whole(path, content.getvalue())
