"""A kernel compiled ahead of time for a GPU that is not here, and what its machine code takes of that GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu_check.gpus import Gpu


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel as it would be launched."""

    name: str
    """What it does, such as "head_gated forward"."""
    function: Any
    """The @triton.jit function, in a process that does not interpret."""
    signature: Mapping[str, str]
    """The type of every argument: "*bf16", "*fp32", "i32", "fp32", or "constexpr"."""
    constants: Mapping[str, Any]
    """The constexpr arguments."""
    warps: int
    stages: int
    tile: str
    """The sizes of its tile, in words."""
    divisible: tuple[str, ...] = ()
    """Arguments that are multiples of 16: addresses that torch allocated, strides of wide heads."""
    operations: float | None = None
    """Of matrix products, in the launch that the table describes."""
    bytes: float | None = None
    """Of its arguments in that launch, each read or written once: the least that must move."""
    attributes: Mapping[Any, Any] = field(default_factory=dict)
    """As triton's compiler takes them, in place of `divisible`."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What ptxas made of a kernel."""

    registers: int
    """Of a thread."""
    spilled: int
    """Bytes of a thread that are stored because registers do not suffice."""
    shared: int
    """Bytes of shared memory of a block."""
    blocks: int
    """That run on a multiprocessor at the same time; 0 if not even one fits."""
    unit: str
    """The matrix unit that is used: "wgmma", "tcgen05", "mma.sync" or "none"."""
    atomics: int
    """Instructions that add to memory that others add to."""
    seconds: float
    """It took to compile."""


def compile_kernel(kernel: Kernel, gpu: Gpu) -> Usage:
    """Compile for a GPU; raises what triton or ptxas raise."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    begin = time.perf_counter()
    names = list(kernel.function.arg_names)
    attributes = dict(kernel.attributes) or {
        (names.index(name),): [["tt.divisibility", 16]] for name in kernel.divisible
    }
    constants = {(names.index(name),): value for name, value in kernel.constants.items()}
    source = ASTSource(kernel.function, dict(kernel.signature), constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", gpu.number, 32)
    built = triton.compile(source, target=target, options={"num_warps": kernel.warps, "num_stages": kernel.stages})
    registers, spilled = counted(built.asm["cubin"], built.asm["ptx"], gpu)
    text = built.asm["ptx"]
    units = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma.sync": "mma.sync"}
    return Usage(
        registers=registers,
        spilled=spilled,
        shared=built.metadata.shared,
        blocks=blocks_at_once(gpu, registers=registers, shared=built.metadata.shared, warps=kernel.warps),
        unit=next((name for name, instruction in units.items() if instruction in text), "none"),
        atomics=len(re.findall(r"\b(?:atom|red)\.", text)),
        seconds=time.perf_counter() - begin,
    )


def counted(machine_code: bytes, text: str, gpu: Gpu) -> tuple[int, int]:
    """Registers of a thread, by cuobjdump, and bytes that it spills, by ptxas."""
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        cubin.write_bytes(machine_code)
        ptx.write_text(text)
        dump = subprocess.run(
            [tools / "cuobjdump", "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
        )
        assembler = tools / ("ptxas-blackwell" if gpu.number >= 100 else "ptxas")
        architecture = gpu.architecture + ("a" if gpu.number >= 90 else "")
        told = subprocess.run(
            [assembler, "-v", f"--gpu-name={architecture}", ptx, "-o", Path(folder, "again.cubin")],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
    registers = re.search(r"REG:(\d+)", dump.stdout)
    spilled = re.search(r"(\d+) bytes spill stores", told)
    assert registers is not None, dump.stdout
    assert spilled is not None, told
    return int(registers[1]), int(spilled[1])


def blocks_at_once(gpu: Gpu, *, registers: int, shared: int, warps: int) -> int:
    """How many blocks of a kernel a multiprocessor holds at the same time; 0 if one asks for more than there is."""
    if shared > gpu.shared_memory:
        return 0
    # Registers are given to warps in pieces of 256, shared memory with 1,024 bytes for the system's own use.
    of_a_warp = -(-registers * 32 // 256) * 256
    return min(
        gpu.registers // (of_a_warp * warps),
        gpu.shared_memory_of_processor // (shared + 1024),
        gpu.threads // (32 * warps),
        gpu.blocks,
    )
