"""Entmax in place of softmax: what defines it, its kernel, and who refuses it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from varifocal import Branch, Causal, Entmax, Prefix, SoftWindow, Window, attend
from varifocal.attention.backends import UnavailableError

DOCUMENTS = torch.tensor([[-1] * 5 + [0] * 20 + [1] * 12, [0] * 37])
ALPHA = (1.02, 1.3, 1.5, 2.0)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_weights_sum_to_1_and_leave_keys_out() -> None:
    weights = Entmax(torch.tensor(ALPHA)).weigh(3 * normal(2, 4, 5, 40, seed=0))
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 4, 5, dtype=torch.float64))
    read = (weights > 0).double().mean(dim=(0, 2, 3))
    assert bool((read[1:] < read[:-1]).all())


def test_alpha_of_2_is_the_projection_onto_the_simplex() -> None:
    scores = normal(1, 1, 1, 6, seed=1)
    ordered = scores.flatten().sort(descending=True).values
    sums = ordered.cumsum(0) - 1
    size = int((ordered * torch.arange(1, 7) > sums).sum())
    expected = (scores - sums[size - 1] / size).clamp(min=0)
    torch.testing.assert_close(Entmax(torch.tensor([2.0])).weigh(scores), expected)


def test_gradients_agree_with_finite_differences() -> None:
    scores, alpha = normal(1, 3, 2, 6, seed=2).requires_grad_(), torch.tensor((1.2, 1.5, 1.8), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda s, a: Entmax(a).weigh(s), (scores, alpha.requires_grad_()))


def results(branch: Branch, dtype: torch.dtype, backend: str) -> list[Tensor]:
    drawn = [normal(2, heads, 37, 8, seed=seed) for seed, heads in enumerate((4, 2, 2))]
    leaves = [one.to(dtype).requires_grad_() for one in (*drawn, torch.tensor(ALPHA, dtype=torch.float64))]
    q, k, v, alpha = leaves
    attended = attend(q, k, v, branches=branch, normalizer=Entmax(alpha), documents=DOCUMENTS, backend=backend)
    gradients = torch.autograd.grad(attended.output, leaves, normal(2, 4, 37, 8, seed=5).to(dtype))
    return [one.detach().double() for one in (attended.output, *gradients)]


@pytest.mark.parametrize("branch", [Causal(), Window(7) | Prefix(2)], ids=repr)
def test_kernel_is_as_accurate_as_the_reference(branch: Branch) -> None:
    truth = results(branch, torch.float64, "reference")
    plain, fast = (results(branch, torch.float32, backend) for backend in ("reference", "native"))
    for true, known, found in zip(truth, plain, fast, strict=True):
        assert float((found - true).abs().max()) <= 2 * float((known - true).abs().max())


def test_backends_honour_entmax_or_refuse_it() -> None:
    q = k = v = torch.zeros(1, 1, 4, 8)
    entmax = Entmax(torch.tensor([1.5]))
    with pytest.raises(UnavailableError, match="backend 'flex' has no kernel for the normalizer Entmax"):
        attend(q, k, v, branches=Causal(), normalizer=entmax, backend="flex")
    soft = SoftWindow(torch.full((1, 1, 4), 3.0), edge=2, limit=3)
    with pytest.raises(UnavailableError, match="backend 'native' has entmax over one branch of windows"):
        attend(q, k, v, branches=soft, normalizer=entmax, backend="native")
    with pytest.raises(ValueError, match="alpha must be above 1 and at most 2"):
        attend(q, k, v, branches=Causal(), normalizer=Entmax(torch.tensor([1.0])))
