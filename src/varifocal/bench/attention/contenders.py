"""What is compared: ours on each backend, torch's own attention, and peers from other packages.

A contender is a law and a way to run it. The law is an equation for `attend`; the way must agree with the reference on
it before it is timed. Peers with a method of their own have no law here and are marked as unchecked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from varifocal import Causal, Indexer, PairGate, Segments, SoftWindow, TopK, Window, attend
from varifocal.attention.backends import BACKENDS
from varifocal.bench.attention.workload import Inputs, Workload

Equation = Callable[[Inputs], dict[str, Any]]
"""The arguments of attend that define what is computed."""
Run = Callable[[Inputs], Tensor]
"""The output [B, H, T, D]."""


@dataclass(frozen=True, eq=False)
class Contender:
    """One row of the benchmark."""

    name: str
    run: Run
    law: Equation | None
    """What it must compute; None for a method of its own."""
    backward: bool = True
    """Whether it can be differentiated on this device."""
    decodes: bool = True
    """Whether it can serve a few queries against a cache."""
    longest: int = 1 << 30
    """The longest text it is asked for: some allocate n x n."""


def dense(inputs: Inputs) -> dict[str, Any]:
    return {"branches": Causal()}


def local(inputs: Inputs) -> dict[str, Any]:
    return {"branches": Window(inputs.workload.window)}


def head_gated(inputs: Inputs) -> dict[str, Any]:
    return {"branches": (Window(inputs.workload.window), Causal()), "weights": two_way(inputs.gate)}


def context_adaptive(inputs: Inputs, *, select: str) -> dict[str, Any]:
    work = inputs.workload
    near = SoftWindow(inputs.width, edge=work.edge, limit=work.window_max)
    far = TopK(scale=work.k_scale, select=select, block=work.block, pooled=inputs.pooled)  # type: ignore[arg-type]
    return {"branches": (near, far), "weights": two_way(inputs.gate)}


def dynamic_sparse(inputs: Inputs) -> dict[str, Any]:
    indexer = Indexer(inputs.index_queries, inputs.index_keys)
    return {"branches": TopK(scale=inputs.workload.k_scale, indexer=indexer) | Window(1)}


def combiner(inputs: Inputs) -> dict[str, Any]:
    return {"branches": Segments(inputs.workload.segment)}


def sparse_geometric(inputs: Inputs) -> dict[str, Any]:
    score = PairGate(
        queries=inputs.pair_queries, keys=inputs.pair_keys, output=inputs.pair_output, scale=inputs.head_scale
    )
    return {"branches": Causal(), "score": score}


def two_way(gate: Tensor) -> Tensor:
    """Weights [B, H, T, 2] of the near and the far branch."""
    return torch.stack((gate, 1 - gate), dim=-1)


OURS: Mapping[str, Equation] = {
    "dense": dense,
    "local": local,
    "head_gated": head_gated,
    "context_adaptive exact": functools.partial(context_adaptive, select="exact"),
    "context_adaptive blocks": functools.partial(context_adaptive, select="blocks"),
    "dynamic_sparse": dynamic_sparse,
    "combiner": combiner,
    "sparse_geometric": sparse_geometric,
}
BASELINE = "torch sdpa causal"
QUADRATIC_LIMIT = 4096
"""Contenders that write out all pairs are not asked for longer texts."""


def contenders(workload: Workload) -> dict[str, Contender]:
    """Everything that can run here, by name; the baseline first."""
    found = [Contender(BASELINE, run_sdpa_causal, dense)]
    found.append(Contender("torch sdpa band mask", run_sdpa_band, local, longest=8192))
    found.append(
        Contender("torch flex window", run_flex_window, local, backward=workload.device.type != "cpu", decodes=False)
    )
    device = workload.device.type
    for backend in (name for name, one in BACKENDS.items() if one.chosen_on is None or device in one.chosen_on):
        short = backend == "reference"
        found += [
            Contender(
                f"{backend} {name}" if short else name,
                functools.partial(run_attend, law=law, backend=backend),
                law,
                decodes=name != "combiner",
                longest=QUADRATIC_LIMIT // 4 if short else 1 << 30,
            )
            for name, law in OURS.items()
            if not short or name in ("dense", "context_adaptive exact")
        ]
    from varifocal.bench.attention.peers import peers

    found += peers()
    return {contender.name: contender for contender in found}


def run_attend(inputs: Inputs, *, law: Equation, backend: str) -> Tensor:
    """Ours on a backend."""
    return attend(inputs.q, inputs.k, inputs.v, **law(inputs), backend=backend).output


def run_sdpa_causal(inputs: Inputs) -> Tensor:
    """torch's fused attention; a few queries at the end of a cache see all of it but what comes after them."""
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
    if work.device.type == "cpu":  # it refuses tensors that ask for gradients there
        q, k, v = q.detach(), k.detach(), v.detach()
    output: Tensor = compiled_flex()(q, k, v, block_mask=mask, enable_gqa=True)
    return output
