"""Calls of the flex backend through either executor: the compiled kernel, or plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.cases import Inputs
from varifocal import Attended
from varifocal.attention.attend import lay_out
from varifocal.equations.problem import Problem
from varifocal.kernels.flex.backend import attend_flex
from varifocal.kernels.flex.dense import attend_dense


def problem_of(inputs: Inputs) -> Problem:
    """The call as a backend receives it."""
    layout = lay_out(inputs.q, inputs.k, inputs.v, documents=inputs.documents, positions=inputs.positions)
    return Problem(inputs.q, inputs.k, inputs.v, inputs.branches, inputs.weights, inputs.score, layout)


def attend_in_plain_torch(inputs: Inputs) -> Attended:
    """The readings, masks and scores of the flex backend, evaluated pair by pair, with gradients."""
    return attend_flex(problem_of(inputs), execute=attend_dense)


def gradients(output: Tensor, inputs: Inputs) -> dict[str, Tensor]:
    """Gradients to every tensor that learns, by name."""
    if not (output.requires_grad and output.numel()):
        return {}
    upstream = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(output, inputs.leaf_tensors(), upstream.to(output.dtype), allow_unused=True)
    pairs = zip(inputs.leaves, inputs.leaf_tensors(), found, strict=True)
    return {name: torch.zeros_like(leaf) if gradient is None else gradient for name, leaf, gradient in pairs}
