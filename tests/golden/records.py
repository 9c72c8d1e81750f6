"""All that is kept of what the project computes, by name, and how closely it must be met again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.golden import attended, mechanisms, models
from tests.golden.fingerprints import Compute, disagreement

VALUES = Path(__file__).with_name("values.json")

COMPUTATIONS: dict[str, Compute] = {
    **attended.computations(),
    **mechanisms.computations(),
    **models.computations(),
}


class Tolerance(NamedTuple):
    """How far a result may be from what is kept."""

    relative: float
    """To the largest number of the fingerprint, or to `least`."""
    least: float
    """Smaller results are what is left of larger ones that cancel, and carry their roundings."""


ROUNDING = torch.finfo(torch.float32).eps

TOLERANCES: dict[str, Tolerance] = {
    # float64: other orders of summation differ by 1e-15.
    "attend/reference/float64": Tolerance(1e-9, 1.0),
    "mechanism/reference": Tolerance(1e-9, 1.0),
    # float32, inputs of size 1: as many roundings as the kernels' own tests allow. Between the portable, AVX2 and
    # AVX-512 targets, and between torch with and without vector units, at most 7 are seen: in the gradient of a
    # bias, a sum over all pairs of a head.
    "attend/reference/float32": Tolerance(24 * ROUNDING, 1.0),
    "attend/native/float32": Tolerance(24 * ROUNDING, 1.0),
    "attend/flex/float32": Tolerance(24 * ROUNDING, 1.0),
    "mechanism/auto": Tolerance(24 * ROUNDING, 1.0),
    # A few of a hundred entries are rounded to the other neighbour, 1/256 away: 4e-5 is seen.
    "attend/native/bfloat16": Tolerance(1e-3, 1.0),
    # Random numbers in float32, some of which vector units round otherwise. Weights are as large as 0.02.
    "model/start": Tolerance(24 * ROUNDING, 0.02),
    # Two layers forward and back, and ten steps: between the same targets losses and logits differ by 2e-6,
    # gradients by 7e-6. The texts are such that no roundings of this size make a top-k select another key.
    "model": Tolerance(3e-5, 0.01),
}
"""By the beginning of the name; the first that fits."""


def disagreements(name: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, str]:
    """How the fingerprints of a case differ from those that are kept, by tensor; empty if they agree."""
    tolerance = next(tolerance for start, tolerance in TOLERANCES.items() if name.startswith(start + "/"))
    answers = {
        label: disagreement(found[label], fingerprint, tolerance=tolerance.relative, least=tolerance.least)
        if label in found
        else "is missing"
        for label, fingerprint in wanted.items()
    } | dict.fromkeys(found.keys() - wanted.keys(), "is not among the values that are kept")
    return {label: answer for label, answer in answers.items() if answer is not None}


def kept_values() -> dict[str, dict[str, Any]]:
    """The fingerprints of every case, as they were recorded."""
    values: dict[str, dict[str, Any]] = json.loads(VALUES.read_text(encoding="utf-8"))
    return values
