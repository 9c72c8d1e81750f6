"""Every case of the one table through every backend that serves it: outputs, logsumexps and gradients."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tests.cases import CASES, CASES_BY_NAME, Inputs
from tests.golden.fingerprints import Compute
from tests.golden.gradients import cotangent, gradients
from tests.kernels.flex_calls import attend_in_plain_torch
from varifocal import Attended

BACKENDS = ("reference", "native", "flex")
ROUNDED = (
    "gqa", "long_mixture", "long_adaptive_mixture", "long_segments", "long_top_k_blocks", "long_pair_product",
    "packed_window_causal", "cached_soft_window_top_k", "decode_window_causal", "padded_and_packed_top_k_indexer",
)  # fmt: skip
"""The cases that also run in bfloat16."""


def attended(case: str, backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The results of one case."""
    inputs = CASES_BY_NAME[case].make(dtype)
    found = attend_on(backend, inputs)
    leaves = {name: inputs.tensors[name] for name in inputs.leaves}
    scalar = (found.output * cotangent(found.output)).sum()
    return {"output": found.output, "logsumexp": found.logsumexp, **gradients(scalar, leaves)}


def attend_on(backend: str, inputs: Inputs) -> Attended:
    """The call on a named backend. A CPU has no backward of FlexAttention: its functions run in plain torch."""
    return attend_in_plain_torch(inputs) if backend == "flex" else inputs.attend(backend)


def computations() -> dict[str, Compute]:
    """By name, for every backend; a backend that does not serve a case raises a ValueError."""
    rows = [
        *((case.name, "reference", torch.float64) for case in CASES),
        *((case.name, backend, torch.float32) for backend in BACKENDS for case in CASES),
        *((case, "native", torch.bfloat16) for case in ROUNDED),
    ]
    return {
        f"attend/{backend}/{str(dtype).removeprefix('torch.')}/{case}": functools.partial(
            attended, case, backend, dtype
        )
        for case, backend, dtype in rows
    }
