"""How much of each key a query reads: rows of a matrix that never exists as a whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from varifocal.attention.attend import evaluate, lay_out
from varifocal.attention.mechanisms.base import Call, Mechanism


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """The weights that the queries of a call give to its keys."""

    branches: tuple[Tensor, ...]
    """[H, T, S] for each branch; each query's sum to 1, or to 0 where a branch reads nothing."""
    shares: Tensor | None
    """[H, T, M]: the weight of each branch; None for a single one."""

    @property
    def mixed(self) -> Tensor:
        """[H, T, S]: of the mix of all branches."""
        if self.shares is None:
            return self.branches[0]
        return (torch.stack(self.branches, dim=-1) * self.shares[:, :, None]).sum(dim=-1)


@torch.no_grad()
def attention_weights(
    mechanism: Mechanism[Any], x: Tensor, q: Tensor, k: Tensor, *, last: int | None = None, backend: str = "auto"
) -> AttentionWeights:
    """The weights of a text of one row (B = 1), for all queries or the last ones.

    The output of every mechanism is linear in the values, so the weights are its output for unit vectors as values: D
    keys in a row of a batch, whatever the mechanism does. Each branch is read for itself.

    Args:
        mechanism: the layer's.
        x: the layer's normed input [1, S, C].
        q: queries [1, H, S, D].
        k: keys [1, G, S, D].
        last: how many queries, from the end; None for all.
        backend: as in attend.
    """
    # The values are replaced below, so the keys stand in for them here.
    memory = mechanism.memory()
    memory.records_past = True
    remembered = memory.append(x, q, k, k)
    keys, width = remembered.k.shape[2], k.shape[3]
    asking = q.shape[2] if last is None else last
    x, q = x[:, x.shape[1] - asking :], q[:, :, q.shape[2] - asking :]
    layout = lay_out(q, remembered.k, remembered.v)
    equation = mechanism.equation(Call(x, q, remembered, layout, backend))
    found: list[Tensor] = []
    for branch in equation.branches:
        # Branch by branch, so that a caller sees what each one reads and not only the mix.
        alone = replace(equation, branches=(branch,), weights=None).of_keys()
        rows = []
        for first in range(0, keys, width):
            values = unit_values(remembered.k, first)
            attended = evaluate(alone, q, remembered.k, values, layout=layout, backend=backend)
            rows.append(attended.output[0])  # [H, T, D]
        found.append(torch.cat(rows, dim=-1)[..., :keys].float())  # [H, T, S]
    return AttentionWeights(tuple(found), None if equation.weights is None else equation.weights[0].float())


def unit_values(k: Tensor, first: int) -> Tensor:
    """Values [1, G, S, D]: key first + d has the unit vector d, and all others have 0."""
    values = torch.zeros_like(k)
    width = k.shape[3]
    index = torch.arange(first, min(k.shape[2], first + width), device=k.device)
    values[:, :, index, index - first] = 1
    return values
