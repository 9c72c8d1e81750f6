"""The case that a contender must pass before it is timed: outputs and gradients against the reference in float64."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from varifocal.bench.attention.contenders import Contender, run_law
from varifocal.bench.attention.workload import Inputs, Workload, make_inputs

CHECK_LENGTH = 640
"""Longer than the widest window of the defaults, and not a multiple of a block of 96 or 256."""
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""The largest error allowed, relative to the largest entry: a few hundred roundings of the type."""


def fault(contender: Contender, workload: Workload) -> str | None:
    """None if the contender computes its law or has none; otherwise a sentence that says what is wrong."""
    if contender.law is None:
        return None
    work = replace(workload, length=min(CHECK_LENGTH, workload.length), batch=1)
    inputs = make_inputs(work, exact=True)
    contender.law(inputs)
    # The law must see the numbers that the contender sees, already rounded to the contender's type.
    law = inputs.widened()
    expected = run_law(law, law=contender.law, backend="reference")
    try:
        output = contender.run(inputs)
        pairs = {"output": (output, expected)}
        if contender.backward and workload.queries is None:
            pairs |= gradients(inputs, output, law, expected)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    for name, (found, wanted) in pairs.items():
        off = float(
            (found.detach().double() - wanted.detach()).abs().max() / wanted.detach().abs().max().clamp(min=1e-30)
        )
        if not off <= TOLERANCE[workload.dtype]:
            return f"{name} is off by {off:.1e} of its largest entry, expected at most {TOLERANCE[workload.dtype]:.0e}"
    return None


def gradients(inputs: Inputs, output: Tensor, law: Inputs, expected: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """The gradients of both outputs for the same cotangent, by the name of the tensor that they reach."""
    pairs = {}
    wanted = torch.autograd.grad(expected, list(law.leaves().values()), law.cotangent, allow_unused=True)
    found = torch.autograd.grad(output, list(inputs.leaves().values()), inputs.cotangent, allow_unused=True)
    for name, one, two in zip(inputs.leaves(), found, wanted, strict=True):
        if two is not None:
            pairs[f"gradient to {name}"] = (torch.zeros_like(two) if one is None else one, two)
    return pairs
