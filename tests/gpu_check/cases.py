"""Interpreted kernels held to the reference: the table of cases, and the promises of the conformance kit."""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import time
from dataclasses import dataclass, replace

import torch

from tests.cases import CASES, Case
from tests.kernels import accuracy
from varifocal import conformance
from varifocal.attention.backends import UnavailableError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
REPRESENTATIVE = (
    *("gqa", "windows_by_head", "strided", "random_blocks", "soft_window", "segments", "top_k", "top_k_ties"),
    *("top_k_blocks", "indexer", "window_and_causal", "soft_window_and_top_k", "pair_product"),
    *("cached_window_causal", "positions_out_of_order", "packed_causal", "packed_soft_window"),
    "padded_and_packed_window_causal",
)
"""Some twenty cases that between them meet every branch, score and layout."""


@dataclass(frozen=True)
class Verdict:
    """What a case or a mechanism came to."""

    name: str
    outcome: str
    """"right", "wrong", or "declined" where the backend says that it cannot."""
    worst: float
    """The largest error of an output or gradient, relative to its largest entry."""
    detail: str
    seconds: float
    """Of the processor."""

    def __str__(self) -> str:
        return f"{self.name:40} {self.outcome:9} {self.worst:.1e} {self.seconds:6.1f} s  {self.detail}".rstrip()


def hold(case: Case, backend: str, dtype: torch.dtype) -> Verdict:
    """Compare a case on a backend with the reference: the output and every gradient, by the kernels' own rule."""
    begin = time.process_time()

    def verdict(outcome: str, worst: float, detail: str) -> Verdict:
        return Verdict(case.name, outcome, worst, detail, time.process_time() - begin)

    try:
        worst, allowed = accuracy.worst_errors(case, backend, dtype, seeds=(0,))
    except UnavailableError as reason:
        return verdict("declined", float("nan"), str(reason))
    except Exception as error:
        # One kernel that fails must not hide the others.
        return verdict("wrong", float("nan"), f"it raised {type(error).__name__}: {str(error)[:600]}")
    wrong = [f"{name} {worst[name]:.1e} > {allowed[name]:.1e}" for name in worst if not worst[name] <= allowed[name]]
    return verdict("wrong" if wrong else "right", max(worst.values()), ", ".join(wrong))


def hold_mechanism(name: str, backend: str, dtype: torch.dtype) -> Verdict:
    """Put one variant of a mechanism through the conformance kit."""
    begin = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        found = conformance.check(name, backend=backend, dtype=dtype)
    seconds = time.process_time() - begin
    if found.broken:
        told = "; ".join(f"{finding.row.name}: {finding.detail[:300]}" for finding in found.broken)
        return Verdict(name, "wrong", found.worst, told, seconds)
    kept = sum(finding.verdict == "kept" for finding in found.findings)
    if not kept:
        return Verdict(name, "declined", float("nan"), found.findings[0].detail, seconds)
    return Verdict(name, "right", found.worst, f"{kept} promises kept", seconds)


def named(names: list[str]) -> list[Case]:
    """The cases of those names, in the order of the table; all for none."""
    known = {case.name for case in CASES}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown case {unknown[0]!r}")
    return [case for case in CASES if not names or case.name in names]


def enter(options: argparse.Namespace, verdicts: list[Verdict], *, seconds: float) -> None:
    """Enter a run's outcome in a file, in the place of an earlier one of its kind; `seconds` are of the processor."""
    from tests.gpu_check.table import read_or_new
    from varifocal.environment import environment
    from varifocal.results.gpu_check import InterpretedRun

    def of(outcome: str) -> tuple[str, ...]:
        return tuple(one.name for one in verdicts if one.outcome == outcome)

    what = "representative cases" if getattr(options, "representative", False) else options.verb
    errors = [one.worst for one in verdicts if one.outcome == "right" and math.isfinite(one.worst)]
    run = InterpretedRun(
        backend=options.backend, what=what, dtype=options.dtype, right=len(of("right")), wrong=of("wrong"),
        declined=of("declined"), worst=max(errors, default=None), seconds=seconds, environment=environment(),
    )  # fmt: skip
    record = read_or_new(options.json)
    kept = [
        one for one in record.interpreted if (one.backend, one.what, one.dtype) != (run.backend, run.what, run.dtype)
    ]
    replace(record, interpreted=(*kept, run)).write(options.json)
