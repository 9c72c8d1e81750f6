"""The kernels for GPUs, checked without one: what every test run has of `make gpu-check`."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.gpu_check import __main__

ROOT = Path(__file__).parent.parent.parent
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not here: `make .venv/gpu-check`")

WRONG_KERNEL = """
import sys
from tests.gpu_check import __main__, interpreter, pretended

pretended.load_device()
interpreter.start()
from varifocal.kernels.flex.reading import Reading

Reading.rate = lambda self, score, *pair: score * 1.001
sys.exit(__main__.main())
"""

DECODING = """
from tests.gpu_check import pretended

pretended.load_device()
from tests.gpu_check.gpus import GPUS
from tests.gpu_check.written import written_kernels

print(*(kernel.tile for row, kernel in written_kernels(GPUS["sm_80"], ("head_gated, decoding 4 rows",))), sep="\\n")
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own: to pretend a GPU cannot be undone."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@needs_triton
def test_kernels_written_for_a_gpu_are_as_accurate_as_the_reference() -> None:
    done = run("-m", "tests.gpu_check", "cases", "--representative")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "flex in float32: 18 right, 0 wrong, 0 declined" in done.stdout


@needs_triton
def test_kernel_that_is_wrong_by_a_thousandth_fails_the_check() -> None:
    done = run("-c", WRONG_KERNEL, "cases", "gqa")
    assert done.returncode == 1, done.stdout + done.stderr[-2000:]
    assert "output" in done.stdout
    assert "0 right, 1 wrong" in done.stdout


@needs_triton
def test_one_token_in_several_rows_shares_its_keys_among_blocks() -> None:
    done = run("-W", "ignore", "-c", DECODING)
    assert done.stdout.splitlines() == ["M 16, N 64, keys among 8 blocks"] * 2, done.stdout + done.stderr[-2000:]


def test_torch_that_it_does_not_know_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    monkeypatch.setattr(importlib.metadata, "version", lambda package: "2.99.0")
    monkeypatch.setattr(sys, "argv", ["gpu_check", "cases", "gqa"])
    assert __main__.main() == 2
    assert capsys.readouterr().err == (
        "the check of GPU kernels reaches into private parts of torch 2.13, got 2.99.0; look through "
        "tests/gpu_check/pretended.py, then change the version there\n"
    )
