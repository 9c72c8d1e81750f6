"""varifocal info: what this installation can do here, and why not the rest."""

from __future__ import annotations

import platform

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import varifocal
from varifocal.bench.environment import processor
from varifocal.kernels.native import library


def info() -> None:
    """Say which backends run here and why others do not, and on what they would run."""
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_row("varifocal", varifocal.__version__)
    table.add_row("python", platform.python_version())
    table.add_row("torch", f"{torch.__version__}, {torch.get_num_threads()} threads")
    table.add_row("processor", processor())
    table.add_row("native", native_status())
    table.add_row("reference", "runs: plain torch, any type and device; needs memory for all pairs")
    cuda = f"{torch.cuda.get_device_name()}" if torch.cuda.is_available() else "none here"
    table.add_row("cuda", cuda)
    table.add_row("mechanisms", ", ".join(varifocal.MECHANISMS))
    Console().print(table)


def native_status() -> str:
    """Which targets the native library runs, or why it is missing."""
    missing = library.why_missing()
    if missing is not None:
        return f"missing: {missing}"
    runnable = list(library.targets())
    chosen = next(name for name, index in library.targets().items() if index == library.target())
    return f"runs: {chosen} (also here: {', '.join(name for name in runnable if name != chosen) or 'none'})"
