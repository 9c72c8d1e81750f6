"""Small mechanisms and inputs for the tests of modules."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from varifocal import HeadShape, Mechanism, make_mechanism

SHAPE = HeadShape(model_width=10, heads=4, kv_heads=2, head_width=6)

OPTIONS: dict[str, dict[str, Any]] = {
    "dense": {},
    "local": {"window": 3, "sinks": 2},
    "combiner": {"segment": 3},
    "dynamic_sparse": {"rank": 3, "k_min": 2},
    "context_adaptive": {"window_min": 3, "window_max": 8, "edge": 2},
    "head_gated": {"window": 3},
    "sparse_geometric": {"hidden": 3},
    "bigbird": {"window": 2, "global_tokens": 1, "random_blocks": 1, "block": 2},
    "sparse_transformer": {"stride": 3},
    "focused": {"windows": (None, 3), "sinks": 2},
    "positional_prior": {"learns_center": True},
    "relative_position": {"clip": 3, "values": True},
    "adaptively_sparse": {},
    "fastmax": {},
    "infini": {"segment": 3},
    "routing": {"clusters": 2, "members": 3, "window": 3},
}
"""For each mechanism, sizes at which 12 tokens are a long text."""


class Tokens(NamedTuple):
    """The input of a mechanism."""

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


def small_mechanism(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> Mechanism[Any]:
    """A small mechanism whose parameters are all random: at its start a gate would be constant."""
    mechanism = make_mechanism(name, SHAPE, **(OPTIONS[name] | options)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return mechanism


def tokens(length: int = 12, *, batch: int = 2, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tokens:
    """Random layer inputs, queries, keys and values that learn."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()

    heads, key_heads, width = SHAPE.heads, SHAPE.kv_heads, SHAPE.head_width
    return Tokens(
        x=normal(batch, length, SHAPE.model_width),
        q=normal(batch, heads, length, width),
        k=normal(batch, key_heads, length, width),
        v=normal(batch, key_heads, length, width),
    )
