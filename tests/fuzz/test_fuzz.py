"""Some hundred random calls of attend, held to the reference; `make fuzz N=5000` runs more of them."""

from __future__ import annotations

import pytest

from tests.fuzz.__main__ import failures
from varifocal.kernels.native import library

AT_ONCE = 20
TRIALS = 400


# Torch warns of itself where it first meets a tangent.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.skipif(library.why_missing() is not None, reason="the native library was not built")
@pytest.mark.parametrize("first", range(0, TRIALS, AT_ONCE))
def test_random_calls_agree_with_the_reference(first: int) -> None:
    found = [line for seed in range(first, first + AT_ONCE) for line in failures(seed)]
    assert not found, "\n".join(found)
