"""The table of kernels: each compiled for each GPU, in a process of its own with a limit, and kept by its text."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tests.gpu_check import ahead, module_of, pretended
from tests.gpu_check.gpus import GPUS, Gpu

SIZE = "batch 2, 12 query heads and 6 key heads of 128, 2048 tokens, bfloat16"
SECONDS = 150
"""Of processor time that a kernel may take to compile. Nobody waits longer for the first step of a training."""
NOT_PRACTICAL = {"sparse_geometric"}
"""Rows whose kernels are known to take longer or not to fit: docs/backends.md says so."""


def compile_for(gpu: Gpu, backend: str, names: Sequence[str], into: Path) -> None:
    """Compile every kernel of a backend for a GPU, and write rows of the record as they come; in a fresh process."""
    pretended.load_device()
    rows = []
    for row, kernel in module_of(backend).kernels(gpu, tuple(names)):
        found = compiled_or_kept(kernel, gpu)
        usage = {name: found.get(name) for name in ("registers", "spilled", "shared", "blocks", "atomics")}
        rows.append({
            "backend": backend, "row": row, "name": kernel.name, "gpu": gpu.architecture, "tile": kernel.tile,
            "warps": kernel.warps, "stages": kernel.stages, "operations": kernel.operations, "bytes": kernel.bytes,
            **usage, "limit": gpu.shared_memory, "unit": found.get("unit", ""), "seconds": found["seconds"],
            "failure": found.get("failure", ""),
        })  # fmt: skip
        told = found.get("failure") or ", ".join(f"{name} {number}" for name, number in usage.items())
        sys.stdout.write(f"{gpu.architecture} {kernel.name} [{kernel.tile}]: {told}\n")
        sys.stdout.flush()
        into.write_text(json.dumps(rows))


def compiled_or_kept(kernel: ahead.Kernel, gpu: Gpu) -> dict[str, Any]:
    """What a kernel takes, or the failure; kept under build/ for another run with the same text."""
    said = [gpu.architecture, kernel.function.cache_key, kernel.warps, kernel.stages, SECONDS]
    said += [sorted(map(str, kernel.signature.items())), sorted(map(str, kernel.constants.items()))]
    kept = pretended.BUILD / "compiled" / f"{hashlib.sha256(repr(said).encode()).hexdigest()[:24]}.json"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(compiled_with_limit(kernel, gpu)))
    content: dict[str, Any] = json.loads(kept.read_text())
    return content


def compiled_with_limit(kernel: ahead.Kernel, gpu: Gpu) -> dict[str, Any]:
    begin = time.perf_counter()
    ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        try:
            theirs.send(asdict(ahead.compile_kernel(kernel, gpu)))
        except Exception as error:
            theirs.send({"failure": f"{type(error).__name__}: {str(error)[:300]}"})

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    theirs.close()
    try:
        found: dict[str, Any] = ours.recv()
    except EOFError:
        found = {"failure": f"it was not compiled within {SECONDS} s of processor time"}
    process.join()
    return {"seconds": time.perf_counter() - begin} | found


def make_table(backends: Iterable[str], gpus: Sequence[str], names: Sequence[str], file: Path | None) -> int:
    """Compile for all GPUs, enter the rows in the file, and tell what does not fit; 1 if something new does not."""
    from varifocal.environment import environment
    from varifocal.results.gpu_check import CompiledKernel

    rows: list[CompiledKernel] = []
    for backend in backends:
        for architecture in gpus:
            part = pretended.BUILD / f"rows_{backend}_{architecture}.json"
            part.parent.mkdir(parents=True, exist_ok=True)
            part.unlink(missing_ok=True)
            command = [sys.executable, "-m", "tests.gpu_check", "compile", architecture, *names, "--backend", backend]
            subprocess.run([*command, "--into", str(part)], check=True)
            rows += [CompiledKernel.from_json(one) for one in json.loads(part.read_text())]
    if file is not None:
        record = read_or_new(file)
        fresh = {(one.backend, one.row, one.gpu) for one in rows}
        kept = [one for one in record.compiled if (one.backend, one.row, one.gpu) not in fresh]
        replace(record, compiled=(*kept, *rows), environment=environment()).write(file)
    misfits = [one for one in rows if not one.fits]
    for one in misfits:
        told = one.failure or f"asks for {one.shared} bytes of shared memory, of which there are {one.limit}"
        sys.stdout.write(f"does not fit: {one.backend} {one.name} on {one.gpu}: {told}\n")
    return 1 if any(one.row not in NOT_PRACTICAL for one in misfits) or not rows else 0


def read_or_new(file: Path) -> Any:
    """The record in the file, or an empty one."""
    from varifocal.environment import environment
    from varifocal.results.gpu_check import GpuCheck

    if file.exists():
        return GpuCheck.read(file)
    return GpuCheck(size=SIZE, interpreted=(), compiled=(), environment=environment())


def gpus_named(names: Sequence[str]) -> list[str]:
    """Architectures, all for none; ValueError for an unknown one."""
    for name in names:
        if name not in GPUS:
            raise ValueError(f"unknown GPU {name!r}; known are {', '.join(GPUS)}")
    return list(names) or list(GPUS)
