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
MOST_BYTES = 1 << 29
"""The most bytes that all arrays may unpack to; a thousand validations of a large model take less than half of it."""
Traces = dict[str, NDArray[Any]]
""""step" [N], the others [N, L, H] or [N, L, H, D]."""


def read_gate_traces(path: Path) -> Traces:
    """The arrays of the file, or none if it does not exist; ValueError if it is something else."""
    if not path.is_file():
        return {}
    try:
        traces = unpacked(path)
    # Damaged archives end in errors of zip, zlib, numpy and Python's own parser.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"cannot read {path}: {reason}; remove it to do without what it recorded") from error
    steps = traces.get("step")
    if steps is None or steps.ndim != 1 or not numpy.issubdtype(steps.dtype, numpy.integer):
        raise ValueError(f"cannot read {path}: it has no steps; remove it to do without what it recorded")
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


def unpacked(path: Path) -> Traces:
    """The arrays of an archive, unless they would fill the memory."""
    with zipfile.ZipFile(path) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    if size > MOST_BYTES:
        raise ValueError(f"its arrays unpack to {size:,} bytes, but the traces of a run have at most {MOST_BYTES:,}")
    with numpy.load(path, allow_pickle=False) as content:
        return {name: content[name] for name in content.files}


def write_gate_traces(path: Path, traces: Traces) -> None:
    """Write the file whole, or leave it as it was."""
    content = io.BytesIO()
    numpy.savez_compressed(content, allow_pickle=False, **traces)
    write_whole(path, content.getvalue())
