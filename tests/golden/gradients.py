"""Gradients by name, with zeros where no gradient comes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def cotangent(output: Tensor) -> Tensor:
    """Random numbers of the output's shape and type, the same for every type."""
    drawn = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return drawn.to(output.dtype)


def gradients(scalar: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of a scalar to every leaf, under the leaf's name."""
    if not scalar.requires_grad:
        return {f"gradient of {name}": torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(scalar, list(leaves.values()), allow_unused=True)
    pairs = zip(leaves.items(), found, strict=True)
    return {f"gradient of {name}": torch.zeros_like(leaf) if one is None else one for (name, leaf), one in pairs}
