"""Tables of what was found out about kernels for GPUs."""

from __future__ import annotations

from dataclasses import replace

from varifocal.report.gpu_check import compiled_table, interpreted_table, state_table
from varifocal.results.environment import Environment
from varifocal.results.gpu_check import CompiledKernel, GpuCheck, InterpretedRun

KERNEL = CompiledKernel(
    backend="flex", row="local", name="local forward", gpu="sm_86", tile="M 128, N 64", warps=8, stages=3,
    operations=9e9, bytes=38e6, registers=255, spilled=0, shared=98304, limit=101376, blocks=1, unit="mma.sync",
    atomics=0, seconds=1.0,
)  # fmt: skip
RUN = InterpretedRun(
    backend="flex", what="cases", dtype="float32", right=184, wrong=("top_k",), declined=(), worst=1.7e-6, seconds=60.0,
    environment=Environment(),
)  # fmt: skip
FOUND = GpuCheck(
    size="a call",
    interpreted=(RUN,),
    compiled=(KERNEL, replace(KERNEL, gpu="sm_80", shared=200_000, limit=166_912, blocks=0)),
    environment=Environment(),
)


def test_kernel_is_told_with_its_tile_and_what_it_takes() -> None:
    header, row = compiled_table(FOUND)
    assert header == ["kernel", "GFLOP", "MB", "sm_86", "sm_80"]
    assert row[:3] == ["local forward", "9.0", "38"]
    assert row[3] == "128 x 64, 8 warps, 3 stages: 255 registers, 0 B spilled, 96 of 99 KB, 1 block"
    assert row[4].endswith("195 of 163 KB, **does not fit**")


def test_state_tells_where_kernels_fit_and_that_none_was_launched() -> None:
    assert state_table(FOUND)[1] == ["`flex`: local", "yes", "sm_86; not for sm_80", "never yet"]


def test_runs_in_the_interpreter_name_what_was_wrong() -> None:
    assert interpreted_table(FOUND)[1] == ["`flex`: cases", "float32", "184", "1 (top_k)", "0", "1.7e-06"]
