"""GPU kernels checked on a machine without a GPU: `make gpu-check`, or `python -m tests.gpu_check --help`.

Each backend with kernels for GPUs has a module here (`flex`, `triton`), with two functions:

- `install()` makes attend(backend=<its name>) run its kernels on CPU tensors, in Triton's interpreter;
- `kernels(gpu, names)` gives the kernels that it ships for a GPU, each with the row that it belongs to, such as
  "head_gated", and as an `ahead.Kernel`, to be compiled and counted; of rows of those names, of all for none.

What holds them is shared. `interpreter.start()` comes first in a process that interprets, before anything imports
triton; `cases.hold(case, backend, dtype)` runs a case of tests/cases.py against the reference, the output and every
gradient, by the rule of the native kernels; `interpreter.fill_fresh_memory()` lets torch.empty hand out NaN;
`ahead.compile_kernel(kernel, gpu)` compiles one with the ptxas of triton's package, and says what it takes of
registers, shared memory and blocks. Interpreting and compiling need processes of their own: triton decides once which
it does.

What is not seen here: races between programs, tf32, pipelining, and time. Nothing here has been launched on a GPU.
"""

from __future__ import annotations

import importlib
from typing import Any

BACKENDS = {"flex": "tests.gpu_check.flex"}
"""The module of each backend with kernels for GPUs."""


def module_of(backend: str) -> Any:
    """The module here that knows a backend's kernels."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; those with kernels for GPUs are {', '.join(BACKENDS)}")
    return importlib.import_module(BACKENDS[backend])
