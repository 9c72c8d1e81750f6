"""What was found out about kernels for GPUs without one, as tables."""

from __future__ import annotations

from varifocal.report.table import Table
from varifocal.results.gpu_check import CompiledKernel, GpuCheck, InterpretedRun


def compiled_table(found: GpuCheck) -> Table:
    """A row for each kernel: its work, and for each GPU the tile and what it takes."""
    gpus = list(dict.fromkeys(one.gpu for one in found.compiled))
    names = list(dict.fromkeys(one.name for one in found.compiled))
    rows = []
    for name in names:
        own = {one.gpu: one for one in found.compiled if one.name == name}
        first = next(iter(own.values()))
        work = ["" if first.operations is None else f"{first.operations / 1e9:.1f}"]
        work.append("" if first.bytes is None else f"{first.bytes / 1e6:.0f}")
        rows.append([name, *work, *(compiled_cell(own[gpu]) if gpu in own else "not compiled" for gpu in gpus)])
    return [["kernel", "GFLOP", "MB", *gpus], *rows]


def compiled_cell(one: CompiledKernel) -> str:
    """128 x 64, 8 warps, 3 stages: 255 registers, 0 B spilled, 96 of 163 KB, 1 block."""
    if one.failure:
        return one.failure
    tile = one.tile.replace("M ", "").replace(", N ", " x ")
    fit = f"{one.blocks} block{'s' if one.blocks and one.blocks > 1 else ''}" if one.fits else "**does not fit**"
    return (
        f"{tile}, {one.warps} warps, {one.stages} stages: {one.registers} registers, {one.spilled} B spilled, "
        f"{(one.shared or 0) / 1024:.0f} of {one.limit / 1024:.0f} KB, {fit}"
    )


def interpreted_table(found: GpuCheck) -> Table:
    """A row for each run in the interpreter."""
    rows = [
        [f"`{one.backend}`: {one.what}", one.dtype, str(one.right), named(one.wrong), named(one.declined), worst(one)]
        for one in found.interpreted
    ]
    return [["interpreted", "type", "right", "wrong", "declined", "worst error"], *rows]


def worst(one: InterpretedRun) -> str:
    return "" if one.worst is None else f"{one.worst:.1e}"


def named(names: tuple[str, ...]) -> str:
    """How many, and which if they are few."""
    return str(len(names)) + (f" ({', '.join(names)})" if 0 < len(names) <= 4 else "")


def state_table(found: GpuCheck) -> Table:
    """A row for each kind of call: how far its kernels have come."""
    rows = []
    for row in dict.fromkeys(one.row for one in found.compiled):
        own = [one for one in found.compiled if one.row == row]
        fit = [gpu for gpu in dict.fromkeys(one.gpu for one in own) if all(o.fits for o in own if o.gpu == gpu)]
        misfit = [gpu for gpu in dict.fromkeys(one.gpu for one in own) if gpu not in fit]
        told = ", ".join(fit) + (f"; not for {', '.join(misfit)}" if misfit else "")
        rows.append([f"`{own[0].backend}`: {row}", "yes", told, "never yet"])
    return [["", "reference", "compiled, and fits", "launched"], *rows]
