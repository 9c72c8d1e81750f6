"""Every mechanism, in sizes that make 29 tokens a long text: outputs, losses and gradients."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import torch
from torch import Tensor

from tests.golden.fingerprints import Compute
from tests.golden.gradients import cotangent, gradients
from varifocal import HeadShape, Mechanism, make_mechanism

SHAPE = HeadShape(model_width=10, heads=4, kv_heads=2, head_width=6)
LENGTH = 29
WINDOWS: dict[str, Any] = {"window_min": 4, "window_max": 11, "edge": 3, "gate": {"hidden": 3}}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "local": ("local", {"window": 5, "sinks": 2}),
    "local window": ("local", {"window": 5, "sinks": 0}),
    "combiner": ("combiner", {"segment": 4}),
    "dynamic_sparse": ("dynamic_sparse", {"rank": 3}),
    "dynamic_sparse blocks": ("dynamic_sparse", {"rank": 3, "select": "blocks", "block": 4}),
    "context_adaptive": ("context_adaptive", WINDOWS),
    "context_adaptive blocks": ("context_adaptive", {**WINDOWS, "select": "blocks", "block": 4}),
    "context_adaptive fixed width": ("context_adaptive", {**WINDOWS, "width": "fixed"}),
    "context_adaptive window": ("context_adaptive", {**WINDOWS, "reads": "local"}),
    "context_adaptive top-k": ("context_adaptive", {**WINDOWS, "reads": "global"}),
    "head_gated": ("head_gated", {"window": 5}),
    "head_gated static": ("head_gated", {"window": 5, "gate": {"kind": "static"}}),
    "head_gated constant": ("head_gated", {"window": 5, "gate": {"kind": "constant", "start": 0.7}}),
    "head_gated capped": ("head_gated", {"window": 5, "gate": {"soft_cap": 2.0, "z_loss": 0.1}}),
    "head_gated normalized": ("head_gated", {"window": 5, "gate": {"normalize_gradient": 0.3}}),
    "sparse_geometric": ("sparse_geometric", {"hidden": 3}),
    "sparse_geometric log": ("sparse_geometric", {"hidden": 3, "form": "log", "bias": 1.0}),
    "sparse_geometric threshold": ("sparse_geometric", {"hidden": 3, "form": "threshold", "threshold": 0.4}),
    "sparse_geometric fixed": ("sparse_geometric", {"hidden": 3, "sparsity": "fixed", "stride": 5}),
    "sparse_geometric none": ("sparse_geometric", {"hidden": 3, "sparsity": "none"}),
    "sparse_geometric unscaled": ("sparse_geometric", {"hidden": 3, "scaling": False}),
    "bigbird": ("bigbird", {"window": 4, "global_tokens": 2, "random_blocks": 2, "block": 3}),
    "sparse_transformer": ("sparse_transformer", {"stride": 5}),
    "focused": ("focused", {"windows": (None, 5), "sinks": 2}),
    "focused windows": ("focused", {"windows": (3, 6), "sinks": 1}),
    "focused sink logit": ("focused", {"windows": (None, 5), "sinks": 2, "sink_logit": True}),
    "local sink logit": ("local", {"window": 5, "sinks": 2, "sink_logit": True}),
    "head_gated sinks": ("head_gated", {"window": 5, "sinks": 2}),
    "context_adaptive sinks": ("context_adaptive", {**WINDOWS, "sinks": 2}),
    "positional_prior": ("positional_prior", {"learns_center": True}),
    "relative_position": ("relative_position", {"clip": 3, "values": True}),
    "adaptively_sparse": ("adaptively_sparse", {}),
    "fastmax order 2": ("fastmax", {"order": 2}),
    "routing": ("routing", {"clusters": 3, "members": 4, "window": 5}),
    "dynamic_sparse input": ("dynamic_sparse", {"rank": 3, "prediction": "input"}),
    "infini": ("infini", {"segment": 4}),
    "infini delta": ("infini", {"segment": 5, "delta": True, "rotary": "none"}),
}
"""By name: a mechanism and its options."""

DOCUMENTS: dict[str, tuple[tuple[int, ...], ...] | None] = {
    "text": None,
    "packed": (
        (0,) * 9 + (1,) + (2,) * 13 + (3,) * 6,
        (-1,) * 4 + (5,) * 17 + (2,) * 5 + (-1,) * 3,
    ),
}
"""One text in each row; or several, with padding on both sides."""

BACKENDS = (("reference", torch.float64), ("auto", torch.float32))
EXACT_ONLY = {"head_gated normalized"}
"""Left out of float32: the size of a normalized gradient follows from how many gradients are not exactly 0, and those
that should be 0 are a rounding or not, as the order of a sum will have it."""


def normal(name: str, *shape: int) -> Tensor:
    """Normal numbers that follow from a name, whatever else is drawn."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def drawn_mechanism(variant: str, dtype: torch.dtype) -> Mechanism[Any]:
    """A mechanism some way from its start, where gates are constant and would hide mistakes."""
    name, options = VARIANTS[variant]
    torch.manual_seed(0)
    mechanism = make_mechanism(name, SHAPE, **options).to(dtype)
    with torch.no_grad():
        for label, parameter in mechanism.named_parameters():
            # Vectors start at constants that say something. Matrices start random in float32, which differs a little
            # between processors, or at 0.
            start = parameter if parameter.ndim == 1 else torch.zeros_like(parameter)
            parameter.copy_(start + 0.5 * normal(label, *parameter.shape))
    return mechanism


def attended(variant: str, layout: str, backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The results of one call. The losses are differentiated with the output: an indexer learns from nothing else."""
    mechanism = drawn_mechanism(variant, dtype)
    shapes = {
        "x": (2, LENGTH, SHAPE.model_width),
        "q": (2, SHAPE.heads, LENGTH, SHAPE.head_width),
        "k": (2, SHAPE.kv_heads, LENGTH, SHAPE.head_width),
        "v": (2, SHAPE.kv_heads, LENGTH, SHAPE.head_width),
    }
    tokens = {name: normal(name, *shape).to(dtype).requires_grad_() for name, shape in shapes.items()}
    ids = DOCUMENTS[layout]
    documents = None if ids is None else torch.tensor(ids)
    found = mechanism(*tokens.values(), documents=documents, backend=backend)
    scalar = (found.output * cotangent(found.output)).sum()
    for loss in found.losses.values():
        scalar = scalar + loss
    losses = {f"loss {name}": loss for name, loss in found.losses.items()}
    leaves = tokens | dict(mechanism.named_parameters())
    return {"output": found.output, **losses, **gradients(scalar, leaves)}


def computations() -> dict[str, Compute]:
    """By name, for every variant, layout and backend."""
    return {
        f"mechanism/{backend}/{layout}/{variant}": functools.partial(attended, variant, layout, backend, dtype)
        for backend, dtype in BACKENDS
        for layout in DOCUMENTS
        for variant in VARIANTS
        if dtype == torch.float64 or variant not in EXACT_ONLY
    }
