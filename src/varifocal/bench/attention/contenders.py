"""What is compared: our attention on each backend, torch's own, and peers from other packages.

A contender is a law and a way to run it. The law is an equation for `attend`; before the contender is timed, it must
agree with the reference on that equation. Peers that compute something else have no law here and are marked as
unchecked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from varifocal import MECHANISMS, Causal, Window
from varifocal.attention.attend import attend
from varifocal.attention.backends import BACKENDS
from varifocal.bench.attention.workload import Inputs, Law, Workload, make_inputs
from varifocal.bench.rows import REFERENCE, rows_of_ours, serves
from varifocal.equations.equation import Equation

Run = Callable[[Inputs], Tensor]
"""The output [B, H, T, D]."""


@dataclass(frozen=True, eq=False)
class Contender:
    """One row of the benchmark."""

    name: str
    run: Run
    law: Callable[[Inputs], Law] | None
    """What it must compute; None if it computes something that we have no equation for."""
    backward: bool = True
    """Whether it can be differentiated on this device."""
    decodes: bool = True
    """Whether it can serve a few queries against a cache."""
    longest: int = 1 << 30
    """The longest text that it is timed on: some contenders allocate n x n numbers."""


def causal(inputs: Inputs) -> Law:
    """Every key up to the query's own: torch's attention."""
    return Law(Equation((Causal(),)), None)


def window(inputs: Inputs, more: int = 0) -> Law:
    """The last keys, as windows of other packages read them; `more` for packages that read a few more keys."""
    return Law(Equation((Window(inputs.workload.window + more),)), None)


BASELINE = "torch sdpa causal"
QUADRATIC_LIMIT = 4096
"""Contenders that write out all pairs are not timed on longer texts."""


def contenders(workload: Workload) -> dict[str, Contender]:
    """Everything that can run here, by name; the baseline first."""
    found = [Contender(BASELINE, run_sdpa_causal, causal)]
    found.append(Contender("torch sdpa band mask", run_sdpa_band, window, longest=8192))
    found.append(
        Contender("torch flex window", run_flex_window, window, backward=workload.device.type != "cpu", decodes=False)
    )
    device = workload.device.type
    for backend in (name for name, one in BACKENDS.items() if one.volunteers_on is None or device in one.volunteers_on):
        slow = backend == REFERENCE
        for name, (mechanism, options) in rows_of_ours().items():
            law = functools.partial(law_of, mechanism=mechanism, options=workload.options(mechanism) | options)
            run = functools.partial(run_law, law=law, backend=backend)
            # The reference runs the mechanisms that have no kernel, and some for comparison.
            compared = name.removeprefix(mechanism).strip() in MECHANISMS[mechanism].bench_reference
            if slow and not compared and any(one.name == name for one in found):
                continue
            if slow or is_served(law, workload, backend):
                longest = QUADRATIC_LIMIT // 4 if slow else 1 << 30
                found.append(Contender(f"{backend} {name}" if slow else name, run, law, longest=longest))
    from varifocal.bench.attention.peers import peers

    found += peers()
    return {contender.name: contender for contender in found}


def law_of(inputs: Inputs, *, mechanism: str, options: dict[str, Any]) -> Law:
    """The law that a mechanism of ours gives for the inputs."""
    return inputs.law(mechanism, options)


def is_served(law: Callable[[Inputs], Law], workload: Workload, backend: str) -> bool:
    """Whether a backend has kernels for a law."""
    inputs = make_inputs(replace(workload, length=8, queries=None, batch=1))
    return serves(backend, law(inputs).equation, inputs.q, inputs.k, inputs.v)


def run_law(inputs: Inputs, *, law: Callable[[Inputs], Law], backend: str) -> Tensor:
    """Our attention on a backend, called as anybody calls it."""
    equation, shortcuts = law(inputs)
    return attend(
        inputs.q, inputs.k, inputs.v, branches=equation.branches, weights=equation.weights, score=equation.score,
        normalizer=equation.normalizer, relative_values=equation.relative_values, shortcuts=shortcuts, backend=backend,
    ).output  # fmt: skip


def run_sdpa_causal(inputs: Inputs) -> Tensor:
    """torch's fused attention; a few queries at the end of a cache see all of it except what comes after them."""
    whole = inputs.workload.queries is None
    mask = None if whole or inputs.workload.queries == 1 else causal_mask(inputs.workload)
    return F.scaled_dot_product_attention(
        inputs.q, inputs.k, inputs.v, attn_mask=mask, is_causal=whole, enable_gqa=True
    )


def run_sdpa_band(inputs: Inputs) -> Tensor:
    """torch's attention with a window given as a mask."""
    work = inputs.workload
    mask = causal_mask(work).triu(work.length - work.asking - work.window + 1)
    return F.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, attn_mask=mask, enable_gqa=True)


def causal_mask(work: Workload) -> Tensor:
    """bool [T, S]: the keys up to each query's own."""
    mask = torch.ones(work.asking, work.length, dtype=torch.bool, device=work.device)
    return mask.tril(work.length - work.asking)


@functools.cache
def compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@functools.cache
def flex_window_mask(length: int, window: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def in_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query - key < window)

    return create_block_mask(in_window, None, None, length, length, device=device)


def run_flex_window(inputs: Inputs) -> Tensor:
    """torch's FlexAttention, compiled, with a block mask of the window."""
    work = inputs.workload
    mask = flex_window_mask(work.length, work.window, str(work.device))
    q, k, v = inputs.q, inputs.k, inputs.v
    if work.device.type == "cpu":  # there it refuses tensors that require gradients
        q, k, v = q.detach(), k.detach(), v.detach()
    output: Tensor = compiled_flex()(q, k, v, block_mask=mask, enable_gqa=True)
    return output
