"""Triton's interpreter, put right where it differs from a GPU: kernels run on CPU memory, one program after another.

Differences that are mended (triton 3.7.1): it keeps bfloat16 as whole numbers, multiplies those as matrices, and cuts
float32 off where a GPU rounds to the nearest. Differences that stay: tf32 is exact, programs never run at the same
time, and no limit of shared memory is known.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

KNOWN_TRITON = "3.7.1"


def start() -> None:
    """Make every kernel of this process an interpreted one."""
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before its interpreter was asked for; start in a process of its own")
    os.environ["TRITON_INTERPRET"] = "1"
    require_triton()
    round_and_multiply_bfloat16()


def fill_fresh_memory() -> None:
    """Let torch.empty and its kin hand out NaN, so that whatever a kernel does not write shows."""
    import torch

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def require_triton() -> None:
    """ImportError with one sentence if triton is missing or unknown."""
    try:
        import triton
    except ImportError as error:
        raise ImportError("the check of GPU kernels needs triton; `make gpu-check` installs it") from error
    if triton.__version__ != KNOWN_TRITON:
        raise ImportError(
            f"the check of GPU kernels knows triton {KNOWN_TRITON}, got {triton.__version__}; look through "
            "tests/gpu_check/interpreter.py and ahead.py, then change the version there"
        )


def round_and_multiply_bfloat16() -> None:
    """Teach the interpreter what bfloat16 is."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    handle: Any = interpreter.TensorHandle
    old_dot, old_cast, old_convert = builder.create_dot, builder.cast_impl, builder.create_fp_to_fp

    def wide(part: Any) -> Any:
        """Its numbers, bfloat16 as float32."""
        if part.dtype.scalar != tl.bfloat16:
            return part.data
        return (part.data.astype(np.uint32) << 16).view(np.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        if tl.bfloat16 in (a.dtype.scalar, b.dtype.scalar):
            return handle(np.matmul(wide(a), wide(b), dtype=d.data.dtype) + d.data, d.dtype.scalar)
        return old_dot(self, a, b, d, input_precision, max_num_imprecise_acc)

    def is_narrowed(source: Any, kind: Any) -> bool:
        return bool(source.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16)

    def cast_impl(self: Any, source: Any, kind: Any) -> Any:
        if is_narrowed(source, kind):
            return handle(rounded_to_bfloat16(source.data), tl.bfloat16)
        return old_cast(self, source, kind)

    def create_fp_to_fp(self: Any, source: Any, kind: Any, rounding: Any) -> Any:
        if is_narrowed(source, kind):
            return handle(rounded_to_bfloat16(source.data), tl.bfloat16)
        return old_convert(self, source, kind, rounding)

    builder.create_dot = create_dot
    builder.cast_impl = cast_impl
    builder.create_fp_to_fp = create_fp_to_fp
    # They were bound to the old cast by name.
    for name in ("create_fp_ext", "create_fp_trunc"):
        setattr(builder, name, lambda self, source, kind: self.cast_impl(source, kind))


def rounded_to_bfloat16(numbers: Any) -> Any:
    """The bits of float32 numbers rounded to the nearest bfloat16, ties to even, as a GPU does; NaN stays NaN."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded)
