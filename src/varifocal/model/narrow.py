"""Weights held as int8 with a scale for each group of a row: a quarter of the memory, and of what a token reads.

A weight is rounded to scale * n with n from -127 to 127, the scale being the group's largest magnitude / 127: it moves
by half a scale at most. Blocks of GGUF's Q8_0 and Q4_0 are such groups of 32 already.
Products are computed in float32 from the very numbers that the bytes and scales stand for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from varifocal.kernels.steps.few_rows import MOST, linear_of_few
from varifocal.model.steps import runs_natively

GROUPS = (32, 16)
"""How many weights may share a scale, the preferred number first; the kernels take whole vectors of 16."""
LARGEST = 127
WIDENED_AT_A_TIME = 1 << 20
"""Weights that are float32 at any time while many rows are multiplied: 4 MB."""


def narrowed(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """int8 weights [N, C] and their scales, float32 [N, C / group]; ValueError for NaN and infinity."""
    parts = weight.detach().float().reshape(len(weight), -1, group)
    scales = parts.abs().amax(dim=-1) / LARGEST
    if not torch.isfinite(scales).all():
        raise ValueError("weights that hold NaN or infinity cannot be held as int8; use weights='float32'")
    parts = parts / scales.where(scales > 0, 1.0)[..., None]
    return parts.round().clamp(-LARGEST, LARGEST).to(torch.int8).flatten(1), scales


def widened(weight: Tensor, scales: Tensor) -> Tensor:
    """The numbers [N, C] that int8 weights and their scales stand for, in the dtype of the scales."""
    return (weight.view(*scales.shape, -1) * scales[..., None]).flatten(1)


class Narrow(nn.Module):
    """int8 weights [N, C] and their scales [N, C / group]; zeros, until they are loaded."""

    weight: Tensor
    scales: Tensor

    def __init__(self, rows: int, columns: int, group: int) -> None:
        super().__init__()
        # Parameters, for transformers ties no others; bytes cannot take a step, and scales alone should not.
        self.weight = nn.Parameter(torch.zeros(rows, columns, dtype=torch.int8), requires_grad=False)
        self.scales = nn.Parameter(torch.zeros(rows, columns // group, dtype=torch.float32), requires_grad=False)

    def extra_repr(self) -> str:
        rows, columns = self.weight.shape
        return f"{rows} x {columns}, groups of {columns // self.scales.shape[1]}"

    def refuse_training(self) -> None:
        """ValueError where gradients are about to be computed through weights that cannot take a step."""
        if self.training and torch.is_grad_enabled():
            raise ValueError(
                "a model with int8 weights cannot be trained; load it with weights='float32', or call eval() first"
            )


class NarrowLinear(Narrow):
    """A linear layer of int8 weights."""

    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool, group: int) -> None:
        super().__init__(out_features, in_features, group)
        self.in_features, self.out_features = in_features, out_features
        self.register_parameter("bias", nn.Parameter(torch.zeros(out_features), requires_grad=False) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """The layer applied to x [..., C]: to a few rows as the bytes lie in memory, to many by widening a part."""
        self.refuse_training()
        # Nobody looks at sizes while compiling: the program would serve these alone.
        rows = 0 if torch.compiler.is_compiling() else x.numel() // self.in_features
        plain = 0 < rows <= MOST and not torch.is_grad_enabled() and type(x) is Tensor
        if plain and runs_natively(x, self.scales) and self.weight.is_contiguous() and self.scales.is_contiguous():
            found = linear_of_few(x.reshape(rows, -1), self.weight, self.bias, self.scales)
            return found.view(*x.shape[:-1], self.out_features)
        step = max(1, WIDENED_AT_A_TIME // self.in_features)
        if step >= self.out_features:
            return functional.linear(x, self.wide(0, step).to(x.dtype), self.bias)
        first = functional.linear(x, self.wide(0, step).to(x.dtype))
        out = first.new_empty(*x.shape[:-1], self.out_features)
        out[..., :step] = first
        for begin in range(step, self.out_features, step):
            out[..., begin : begin + step] = functional.linear(x, self.wide(begin, step).to(x.dtype))
        return out if self.bias is None else out + self.bias

    def wide(self, begin: int, count: int) -> Tensor:
        """Some rows of the weights as numbers."""
        return widened(self.weight[begin : begin + count], self.scales[begin : begin + count])


class NarrowEmbedding(Narrow):
    """A table of int8 vectors."""

    def forward(self, ids: Tensor) -> Tensor:
        """The vectors [..., C] of the tokens [...]."""
        self.refuse_training()
        rows = ids.flatten()
        return widened(self.weight[rows], self.scales[rows]).view(*ids.shape, -1)


def narrow_linear(linear: nn.Linear, group: int) -> NarrowLinear:
    """An empty layer of int8 weights with the sizes of a linear one, where that one is."""
    with linear.weight.device:
        return NarrowLinear(linear.in_features, linear.out_features, bias=linear.bias is not None, group=group)


def check_narrow(weights: Any, sizes: Mapping[str, int]) -> None:
    """ValueError unless a config's `weights` are None or say how they are held, and the sizes are whole groups."""
    if weights is None:
        return
    group = weights.get("group") if isinstance(weights, Mapping) else None
    if group not in GROUPS or dict(weights) != {"kind": "int8", "group": group}:
        known = " or ".join(str(one) for one in sorted(GROUPS))
        raise ValueError(f"weights must be None or {{'kind': 'int8', 'group': {known}}}, got {weights!r}")
    for name, size in sizes.items():
        if size % group:
            raise ValueError(f"int8 weights in groups of {group} need a {name} that is a multiple of it, got {size}")


def fitting_group(sizes: Mapping[str, int]) -> int:
    """The number of weights that share a scale in rows of these sizes; ValueError if none fits."""
    for group in GROUPS:
        if not any(size % group for size in sizes.values()):
            return group
    odd = ", ".join(f"{name} {size}" for name, size in sizes.items() if size % GROUPS[-1])
    raise ValueError(
        f"weights='int8' shares a scale between {GROUPS[-1]} weights or more, and this model has {odd}; "
        "use weights='float32'"
    )
