"""Every mechanism on the functions of the flex backend, in plain torch: promises kept, gradients to every parameter."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention.mechanisms import OPTIONS, SHAPE, small_mechanism, tokens
from varifocal import conformance, make_mechanism
from varifocal.attention.backends import BACKENDS, LOADED, UnavailableError
from varifocal.equations.problem import Problem
from varifocal.kernels.flex import backend as flex
from varifocal.kernels.flex.backend import attend_flex
from varifocal.kernels.flex.dense import attend_dense

ROUNDING = 1e-10
"""float64: sums of a dozen numbers in another order."""


REFUSED = {
    "relative_position values": "does not know the relative_values",
    "adaptively_sparse": "has no kernel for the normalizer Entmax",
    "adaptively_sparse fixed": "has no kernel for the normalizer Entmax",
    "fastmax": "has no kernel for the normalizer Polynomial",
    "fastmax order 2": "has no kernel for the normalizer Polynomial",
    "infini": "has no kernel for the score OwnFeatures",
    "infini delta": "has no kernel for the score OwnFeatures",
    "infini rotary": "has no kernel for the branch Compressed",
    "routing": "has no kernel for the branch Cluster",
    "routing no window": "has no kernel for the branch Cluster",
}
"""Variants that FlexAttention cannot run, with the reason that is given."""


UNSERVED = {"relative_position", "adaptively_sparse", "routing", "fastmax", "infini"}
"""Mechanisms whose small options are among those refused."""


@pytest.fixture
def flex_in_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """backend="flex" with an executor that has gradients on a CPU and takes float64."""

    def prepare(problem: Any) -> Any:
        if isinstance(problem, Problem):
            if (reason := flex.why_not_equation(problem)) is not None:
                return reason
            return functools.partial(attend_flex, problem, execute=attend_dense)
        return flex.prepare(problem)

    monkeypatch.setitem(LOADED, BACKENDS["flex"].module, SimpleNamespace(HONOURS=flex.HONOURS, prepare=prepare))


@pytest.mark.usefixtures("flex_in_plain_torch")
@pytest.mark.parametrize("name", [name for name in conformance.every_variant() if name not in REFUSED])
def test_mechanism_keeps_its_promises(name: str) -> None:
    result = conformance.check(name, backend="flex")
    assert result.conforms, str(result)
    assert any(finding.verdict == "kept" for finding in result.findings)


@pytest.mark.usefixtures("flex_in_plain_torch")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused(name: str) -> None:
    variant = conformance.every_variant()[name]
    mechanism = make_mechanism(variant.mechanism, SHAPE, **variant.options).double()
    with pytest.raises(UnavailableError, match=f"backend 'flex' {REFUSED[name]}"):
        mechanism(*tokens(), backend="flex")


def run(name: str, backend: str, select: str | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of a small mechanism, and the gradients to its parameters and to q, k and v."""
    options: dict[str, Any] = {} if select is None else {"select": select, "block": 2}
    mechanism = small_mechanism(name, **options)
    part = tokens()
    documents = torch.tensor([[-1, -1, *[0] * 4, *[1] * 6], [0] * 12])
    result = mechanism(*part, documents=documents, backend=backend)
    total = sum(result.losses.values(), (result.output * torch.linspace(-1, 1, 6)).sum())
    wanted = {"q": part.q, "k": part.k, "v": part.v, **dict(mechanism.named_parameters())}
    gradients = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
    return result.output, {
        key: gradient for key, gradient in zip(wanted, gradients, strict=True) if gradient is not None
    }


@pytest.mark.usefixtures("flex_in_plain_torch")
@pytest.mark.parametrize(
    ("name", "select"),
    [
        *((name, None) for name in OPTIONS if name not in UNSERVED),
        ("context_adaptive", "blocks"),
        ("dynamic_sparse", "blocks"),
    ],
    ids=str,
)
def test_every_parameter_gets_the_reference_s_gradient(name: str, select: str | None) -> None:
    output, gradients = run(name, "flex", select)
    wanted, wanted_gradients = run(name, "reference", select)
    torch.testing.assert_close(output, wanted, rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(gradients, wanted_gradients, rtol=ROUNDING, atol=ROUNDING)
    assert all(bool((gradient != 0).any()) for gradient in gradients.values())
