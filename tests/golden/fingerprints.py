"""What is kept of a tensor: enough that any change of meaning shows, and few enough numbers to commit."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Compute = Callable[[], dict[str, Tensor]]
"""Computes the tensors of one case, by name."""

PROJECTIONS = 4
WHOLE = 12
"""Tensors of at most so many entries are kept as they are."""
SEES_NOTHING = -100.0
"""Stands for minus infinity, the logsumexp of a query that sees nothing."""


def fingerprint(tensor: Tensor) -> Any:
    """A tensor as JSON: whole numbers in full; of others the shape, the root mean square and a few projections.

    A projection is the sum of all entries with random signs over the root of their number. It is as large as a
    typical entry, and so is its error.
    """
    tensor = tensor.detach()
    if not tensor.is_floating_point():
        return tensor.tolist()
    entries = tensor.double().flatten()
    entries = torch.where(entries == float("-inf"), SEES_NOTHING, entries)
    if entries.numel() > WHOLE:
        root = entries.numel() ** 0.5
        entries = torch.cat((entries.norm()[None], signs(entries.numel()) @ entries)) / root
    return {"shape": list(tensor.shape), "numbers": [float(f"{entry:.12g}") for entry in entries.tolist()]}


@functools.cache
def signs(length: int) -> Tensor:
    """-1 or 1 [PROJECTIONS, length], the same in every process."""
    drawn = torch.randint(0, 2, (PROJECTIONS, length), generator=torch.Generator().manual_seed(length))
    return drawn.double() * 2 - 1


def disagreement(found: Any, wanted: Any, *, tolerance: float, least: float) -> str | None:
    """How two fingerprints differ by more than the tolerance, which is relative to the entries or to `least`."""
    if not isinstance(wanted, Mapping):
        return None if found == wanted else f"got {found}, expected {wanted}"
    if found["shape"] != wanted["shape"]:
        return f"got shape {found['shape']}, expected {wanted['shape']}"
    size = max((abs(number) for number in wanted["numbers"]), default=0.0)
    allowed = tolerance * max(size, least)
    pairs = zip(found["numbers"], wanted["numbers"], strict=True)
    # Written so that NaN disagrees.
    if all(abs(one - other) <= allowed for one, other in pairs):
        return None
    return f"got {found['numbers']}, expected {wanted['numbers']} within {allowed:.1e}"


def hashed(tensor: Tensor) -> str:
    """The SHA-256 of type, shape and every bit."""
    tensor = tensor.detach().contiguous()
    label = f"{tensor.dtype} {list(tensor.shape)} ".encode()
    return hashlib.sha256(label + tensor.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
