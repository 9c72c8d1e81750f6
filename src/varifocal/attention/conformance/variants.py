"""The mechanisms of ours that `varifocal check` holds to the promises, in sizes that make short texts interesting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from varifocal.attention.conformance.rows import Bench
from varifocal.attention.conformance.subject import MechanismSubject
from varifocal.attention.mechanisms import MECHANISMS, HeadShape, make_mechanism
from varifocal.attention.mechanisms.registry import mechanism_type


@dataclass(frozen=True)
class Variant:
    """A mechanism with options for texts of some thirty tokens."""

    mechanism: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    window: int | None = None
    """For a pure window, the keys it reads."""
    selects: int | None = None
    """For a top-k, the length of the units it selects."""


GATE: Mapping[str, Any] = {"hidden": 3}
WINDOWS: Mapping[str, Any] = {"window_min": 4, "window_max": 11, "edge": 3, "gate": GATE}

VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("dense", "dense"),
        Variant("local", "local", {"window": 5, "global_tokens": 2}),
        Variant("local", "local window", {"window": 5, "global_tokens": 0}, window=5),
        Variant("combiner", "combiner", {"segment": 4}),
        Variant("dynamic_sparse", "dynamic_sparse", {"rank": 3}, selects=1),
        Variant("dynamic_sparse", "dynamic_sparse blocks", {"rank": 3, "select": "blocks", "block": 4}, selects=4),
        Variant("context_adaptive", "context_adaptive", WINDOWS, selects=1),
        Variant("context_adaptive", "context_adaptive blocks", {**WINDOWS, "select": "blocks", "block": 4}, selects=4),
        Variant("head_gated", "head_gated", {"window": 5}),
        Variant("sparse_geometric", "sparse_geometric", {"hidden": 3}),
        Variant("sparse_geometric", "sparse_geometric log", {"hidden": 3, "form": "log", "bias": 1.0}),
        Variant("sparse_geometric", "sparse_geometric threshold", {"hidden": 3, "form": "threshold", "threshold": 0.4}),
        Variant("bigbird", "bigbird", {"window": 4, "global_tokens": 2, "random_blocks": 2, "block": 3}),
        Variant("sparse_transformer", "sparse_transformer", {"stride": 5}),
    )
}


def variants_of(mechanism: str) -> tuple[str, ...]:
    """The names of a mechanism's variants (or the variant itself, if it is one)."""
    if mechanism in VARIANTS and mechanism not in MECHANISMS:
        return (mechanism,)
    mechanism_type(mechanism)
    return tuple(name for name, variant in VARIANTS.items() if variant.mechanism == mechanism)


def variant_subject(name: str, bench: Bench, *, backend: str) -> MechanismSubject:
    """A variant with random parameters: at their start, gates are constant and would hide mistakes."""
    if name not in VARIANTS:
        mechanism_type(name)
    variant = VARIANTS[name]
    shape = HeadShape(
        model_width=bench.model_width, heads=bench.heads, kv_heads=bench.kv_heads, head_width=bench.head_width
    )
    mechanism = make_mechanism(variant.mechanism, shape, **variant.options).to(bench.device, bench.dtype)
    with torch.no_grad():
        for number, parameter in enumerate(mechanism.parameters()):
            parameter.add_(bench.normal(*parameter.shape, draw=200 + number), alpha=0.5)
    return MechanismSubject(
        mechanism=mechanism, name=name, backend=backend, window=variant.window, selects=variant.selects
    )
