"""gpu_check.json: what was found out about kernels for GPUs without a GPU, by `python -m tests.gpu_check`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from varifocal.results.environment import Environment
from varifocal.results.files import FileRecord
from varifocal.results.record import Record


@dataclass(frozen=True, kw_only=True)
class InterpretedRun(Record):
    """Kernels that were run in Triton's interpreter and held to the reference, forward and backward."""

    backend: str
    what: str
    """"cases" of the table of cases, "representative cases", or "mechanisms" through the conformance kit."""
    dtype: str
    right: int
    wrong: tuple[str, ...]
    """Names."""
    declined: tuple[str, ...]
    """Names of those that the backend says it cannot run."""
    worst: float | None
    """The largest error of an output or gradient, relative to its largest entry."""
    seconds: float
    """Of the processor."""
    environment: Environment


@dataclass(frozen=True, kw_only=True)
class CompiledKernel(Record):
    """A kernel compiled for a GPU, and what it takes of it."""

    backend: str
    row: str
    """The row of the benchmark whose call launches it."""
    name: str
    gpu: str
    """Such as sm_80."""
    tile: str
    warps: int
    stages: int
    operations: float | None
    """Of its matrix products in a call of the size that the file names."""
    bytes: float | None
    """Of its arguments in that call, each once."""
    registers: int | None
    """Of a thread; this and what follows None where it could not be compiled."""
    spilled: int | None
    """Bytes of a thread."""
    shared: int | None
    """Bytes of shared memory of a block."""
    limit: int
    """Bytes that a block may have."""
    blocks: int | None
    """At once on a multiprocessor; 0 if not even one fits."""
    unit: str
    atomics: int | None
    seconds: float
    failure: str = ""
    """Why it was not compiled."""

    @property
    def fits(self) -> bool:
        return bool(self.blocks)


@dataclass(frozen=True, kw_only=True)
class GpuCheck(FileRecord):
    """All that was found out so far; the latest run of each kind stands."""

    tag: ClassVar[tuple[str, str]] = ("check", "gpu kernels")
    what: ClassVar[str] = "a result of 'python -m tests.gpu_check'"
    remedy: ClassVar[str] = "make one with its --json option"

    size: str
    """The call that operations and bytes are of."""
    interpreted: tuple[InterpretedRun, ...]
    compiled: tuple[CompiledKernel, ...]
    environment: Environment
    """Of the kernels that were compiled."""
