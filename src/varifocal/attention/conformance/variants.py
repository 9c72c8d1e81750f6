"""The mechanisms that `varifocal check` holds to the promises, in the small sizes that each of them names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from varifocal.attention.conformance.rows import Bench
from varifocal.attention.conformance.subject import MechanismSubject
from varifocal.attention.mechanisms import MECHANISMS, HeadShape, make_mechanism
from varifocal.attention.mechanisms.base import Mechanism, typical_equation
from varifocal.attention.mechanisms.registry import mechanism_type
from varifocal.attention.mechanisms.variant import Variant
from varifocal.equations.branches import TopK, Window, members


class NamedVariant(NamedTuple):
    """A variant of a mechanism, as it is asked for."""

    mechanism: str
    name: str
    """The mechanism's, and the variant's label after it."""
    options: Mapping[str, Any]


def every_variant() -> dict[str, NamedVariant]:
    """The variants of all mechanisms by name; a mechanism that names none is tested with its defaults."""
    found = {}
    for name, mechanism in MECHANISMS.items():
        for variant in mechanism.variants or (Variant(),):
            full = f"{name} {variant.label}".strip()
            found[full] = NamedVariant(name, full, variant.options)
    return found


def variants_of(mechanism: str) -> tuple[str, ...]:
    """The names of a mechanism's variants (or the variant itself, if it is one)."""
    known = every_variant()
    if mechanism in known and mechanism not in MECHANISMS:
        return (mechanism,)
    mechanism_type(mechanism)
    return tuple(name for name, variant in known.items() if variant.mechanism == mechanism)


def variant_subject(name: str, bench: Bench, *, backend: str) -> MechanismSubject:
    """A variant with random parameters: at their start, gates are constant and would hide mistakes."""
    known = every_variant()
    if name not in known:
        mechanism_type(name)
    variant = known[name]
    shape = HeadShape(
        model_width=bench.model_width, heads=bench.heads, kv_heads=bench.kv_heads, head_width=bench.head_width
    )
    mechanism = make_mechanism(variant.mechanism, shape, **variant.options).to(bench.device, bench.dtype)
    # What moves by itself while it is trained stands still.
    mechanism.eval()
    with torch.no_grad():
        for number, parameter in enumerate(mechanism.parameters()):
            parameter.add_(bench.normal(*parameter.shape, draw=200 + number), alpha=0.5)
    return MechanismSubject(
        mechanism=mechanism, name=name, backend=backend, window=pure_window(mechanism), selects=selected_unit(mechanism)
    )


def pure_window(mechanism: Mechanism[Any]) -> int | None:
    """The number of keys that a mechanism reads if it is nothing but a window of one size."""
    branches = typical_equation(mechanism, 2).branches
    if len(branches) == 1 and isinstance(branches[0], Window) and isinstance(branches[0].size, int):
        return branches[0].size
    return None


def selected_unit(mechanism: Mechanism[Any]) -> int | None:
    """The length of the units that a mechanism ranks and selects (1 for keys); None if it does not select."""
    for branch in typical_equation(mechanism, 2).branches:
        for member in members(branch):
            if isinstance(member, TopK):
                return 1 if member.select == "exact" else member.block
    return None
