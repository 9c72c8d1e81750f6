"""The functions that FlexAttention generates kernels from, evaluated in plain torch: outputs and gradients, in float64.

A CPU has no backward of FlexAttention. What it can show is that the mask_mod and score_mod functions, the
selections, the rings and the joins are those of the reference, and that gradients pass through all of them.
"""

from __future__ import annotations

import pytest
import torch

from tests.cases import CASES, Case
from tests.kernels.flex_calls import attend_in_plain_torch, gradients

ROUNDING = 1e-10
"""float64: sums of at most 150 numbers in another order, and products of the same through a softmax and back."""

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@every_case
def test_output_and_logsumexp_are_those_of_the_reference(case: Case) -> None:
    inputs = case.make(torch.float64)
    found, wanted = attend_in_plain_torch(inputs), inputs.attend("reference")
    torch.testing.assert_close(found.output, wanted.output, rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(found.logsumexp, wanted.logsumexp, rtol=ROUNDING, atol=ROUNDING)


@every_case
def test_gradients_are_those_of_the_reference(case: Case) -> None:
    inputs = case.make(torch.float64)
    found = gradients(attend_in_plain_torch(inputs).output, inputs)
    wanted = gradients(inputs.attend("reference").output, inputs)
    torch.testing.assert_close(found, wanted, rtol=ROUNDING, atol=ROUNDING)


@every_case
def test_selection_is_that_of_the_reference(case: Case) -> None:
    inputs = case.make(torch.float64)
    for found, wanted in zip(attend_in_plain_torch(inputs).selected, inputs.attend("reference").selected, strict=True):
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            # The reference's list is as wide as this call's largest k, ours as the largest k of such a text.
            width = wanted.shape[-1]
            assert torch.equal(found[..., :width], wanted)
            assert bool((found[..., width:] == -1).all())
