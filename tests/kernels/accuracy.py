"""How accurate a kernel must be: as accurate as the plain reference at the same type, within a factor of two."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.cases import Case, Inputs

SEEDS = (0, 1, 2)
SLACK = 2.0
ROUNDINGS = 24
"""The least that is allowed, in roundings of the type relative to the result's largest entry (or 1, if it is smaller).
Two sums do not come out as the reference's do, and both are larger than what they leave:
- dS = p (dO.v - dO.O): for a query with one key the truth is 0, and the reference is exact because both sums run in the
  same order. A kernel that adds them up in another order is off by a few roundings of the sums; 6 were seen. In
  bfloat16, O itself is rounded before the backward sees it.
- A gradient to a number per head (a scale, a bias) is a sum over all pairs of a head, most of which cancel; 20 seen."""


def results(inputs: Inputs, backend: str) -> dict[str, Tensor]:
    """The output and the gradients to every tensor that learns, by name."""
    output = inputs.attend(backend).output
    found = {"output": output.detach()}
    if output.requires_grad and output.numel():
        upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(inputs.q.dtype)
        upstream = upstream.to(output.dtype)
        gradients = torch.autograd.grad(output, inputs.leaf_tensors(), upstream, allow_unused=True)
        for name, leaf, gradient in zip(inputs.leaves, inputs.leaf_tensors(), gradients, strict=True):
            found[name] = torch.zeros_like(leaf) if gradient is None else gradient
    return found


def worst_errors(
    case: Case, backend: str, dtype: torch.dtype, *, seeds: tuple[int, ...] = SEEDS
) -> tuple[dict[str, float], dict[str, float]]:
    """The largest error of a backend over some seeds, by name, and what the reference's own error allows."""
    worst: dict[str, float] = {}
    own: dict[str, float] = {}
    for seed in seeds:
        inputs = case.make(dtype, seed)
        truth = results(inputs.converted(torch.float64), "reference")
        for errors, found in ((worst, results(inputs, backend)), (own, results(inputs, "reference"))):
            for name, exact in truth.items():
                errors[name] = max(errors.get(name, 0.0), relative_error(found[name], exact))
    floor = ROUNDINGS * torch.finfo(torch.float32 if dtype == torch.float32 else dtype).eps
    return worst, {name: max(SLACK * error, floor) for name, error in own.items()}


def relative_error(found: Tensor, exact: Tensor) -> float:
    """The largest difference, relative to the largest entry or to 1; infinite for NaN."""
    if not exact.numel():
        return 0.0
    difference = (found.double() - exact.double()).abs().max() / exact.abs().max().clamp(min=1.0)
    return float(torch.nan_to_num(difference, nan=float("inf")))
