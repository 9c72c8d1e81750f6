"""The triton backend: some of its cases in Triton's interpreter, and what it says where it cannot run.

`python -m tests.gpu_check.one_pass cases` runs all of them.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from varifocal import Causal, PairGate, Prefix, SoftWindow, TopK, Window, attend
from varifocal.attention.backends import BACKENDS, UnavailableError
from varifocal.kernels.triton import arrangement
from varifocal.kernels.triton.arrangement import CONTINUES, EVERY_KEY, Sizes, arrange, as_sizes
from varifocal.kernels.triton.tiles import tile_of

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which `make gpu-check` installs"
)
REPRESENTATIVE = (
    *("one_weighted_branch", "windows_by_head_inside_causal", "soft_window_prefix", "closed_weights"),
    *("positions_out_of_order", "padded_and_packed_soft_window", "head_scale"),
)


def interpreted(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run python in a process whose kernels are interpreted; one thread, as the other tests."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment)


@needs_triton
def test_cases_are_as_accurate_as_the_reference() -> None:
    ran = interpreted("-m", "tests.gpu_check.one_pass", "cases", *REPRESENTATIVE)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.endswith(f"triton in float32: {len(REPRESENTATIVE)} right, 0 wrong, 0 declined\n"), ran.stdout


@needs_triton
def test_promises_hold_in_the_interpreter() -> None:
    quick = "two or padding or one_operator or autocast or refused"
    ran = interpreted(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu_check/one_pass_promises.py", "-k", quick
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@needs_triton
def test_it_runs_on_a_cpu_in_the_interpreter_only() -> None:
    q = torch.randn(1, 2, 5, 16)
    sentence = (
        r"^backend 'triton' runs on cuda tensors, and on a CPU only in Triton's interpreter \(TRITON_INTERPRET=1\)"
    )
    with pytest.raises(UnavailableError, match=sentence):
        attend(q, q, q, branches=Causal(), backend="triton")


def test_auto_never_takes_it() -> None:
    assert BACKENDS["triton"].volunteers_on == ()


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"branches": TopK()}, "has no kernel for the branch TopK"),
        ({"branches": (Window(1),) * 5}, "mixes at most 4 branches, got 5"),
    ],
)
def test_what_it_does_not_honour_is_refused_in_one_sentence(parts: dict[str, object], reason: str) -> None:
    q = torch.randn(1, 2, 5, 16)
    weights = torch.ones(1, 2, 5, 5) if isinstance(parts["branches"], tuple) else None
    with pytest.raises(UnavailableError, match=f"^backend 'triton' {reason}; use backend='auto' or 'reference'$"):
        attend(q, q, q, weights=weights, backend="triton", **parts)  # type: ignore[arg-type]


def test_a_gate_of_pairs_is_refused() -> None:
    q = torch.randn(1, 2, 5, 16)
    score = PairGate(queries=torch.randn(1, 2, 5, 3), keys=torch.randn(1, 2, 5, 3), output=torch.randn(2, 3))
    with pytest.raises(UnavailableError, match="has no kernel for the score PairGate"):
        attend(q, q, q, branches=Causal(), score=score, backend="triton")


@needs_triton
def test_bits_of_kinds_are_those_of_the_kernels() -> None:
    from varifocal.kernels.triton import rings

    for name in ("EVERY", "WINDOW", "PREFIX", "SOFT", "CONTINUES"):
        assert getattr(rings, name).value == getattr(arrangement, name)
    assert rings.FAR.value == EVERY_KEY


@needs_triton
def test_kernel_that_is_shipped_fits_its_gpu_and_spills_nothing() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", COMPILES], capture_output=True, text=True, check=False, env=environment
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr


COMPILES = """
from tests.gpu_check.ahead import compile_kernel
from tests.gpu_check.gpus import GPUS
from tests.gpu_check.one_pass import kernels

(kernel,) = [one for one in kernels(GPUS["sm_80"], widths=(64,)) if one.name.startswith("window, causal: queries")]
usage = compile_kernel(kernel, GPUS["sm_80"])
assert usage.blocks >= 1 and usage.spilled == usage.atomics == 0 and usage.unit == "mma.sync", usage
"""


@pytest.mark.parametrize("bytes_each", [2, 4])
@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90, 100, 120])
def test_every_kernel_has_a_tile_on_every_gpu(capability: int, bytes_each: int) -> None:
    for kernel in ("forward", "queries", "keys"):
        for width in (16, 32, 64, 128, 256):
            for documents in (False, True):
                tile = tile_of(
                    kernel, width=width, bytes_each=bytes_each, capability=capability, documents=documents
                )  # fmt: skip
                assert min(tile.queries, tile.keys) >= 16


def window(size: int, prefix: int = 0, **soft: float) -> Sizes:
    return Sizes((size,) * 2, (prefix,) * 2, **soft)  # type: ignore[arg-type]


def test_branches_are_read_from_the_inside_out() -> None:
    found = arrange((window(EVERY_KEY), window(3), window(9, 2)))
    assert found.order == (1, 2, 0)
    assert [bool(found.kinds >> (arrangement.BITS * ring) & CONTINUES) for ring in range(3)] == [False, True, True]


def test_soft_window_lies_inside_a_window_that_holds_its_limit() -> None:
    soft = window(0, limit=8, edge=2.0)
    assert soft.inside(window(8))
    assert not soft.inside(window(7))
    assert not soft.inside(window(9, limit=20, edge=2.0))
    assert soft.inside(window(EVERY_KEY))


def test_window_of_one_head_that_sticks_out_begins_anew() -> None:
    found = arrange((Sizes((1, 9), (0, 0)), Sizes((5, 5), (0, 0))))
    assert not any(found.kinds >> (arrangement.BITS * ring) & CONTINUES for ring in range(2))


def test_union_is_the_largest_of_each_part() -> None:
    branch = Window((1, None)) | Prefix(3) | Window(2)
    assert as_sizes(branch, 2) == (Sizes((2, EVERY_KEY), (3, 3)), None)
    width = torch.full((1, 2, 5), 4.0)
    sizes, found = as_sizes(SoftWindow(width, edge=2, limit=6) | Causal(), 2) or (None, None)
    assert sizes is not None
    assert found is not None
    assert not sizes.soft, "every key is read in full anyway"
