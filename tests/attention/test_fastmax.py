"""A polynomial in place of the exponential: the scan over chunks against all pairs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from varifocal import Causal, HeadShape, OwnFeatures, Polynomial, Window, attend, make_mechanism
from varifocal.attention.backends import UnavailableError
from varifocal.kernels.native import polynomial
from varifocal.plan.work import work

DOCUMENTS = torch.tensor([[-1] * 5 + [0] * 20 + [1] * 12, [0] * 37])


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def results(order: int, dtype: torch.dtype, backend: str) -> list[Tensor]:
    spread = 0.3 if order == 1 else 1.0
    drawn = [normal(2, heads, 37, 5, seed=seed) * spread for seed, heads in enumerate((4, 2, 2))]
    leaves = [one.to(dtype).requires_grad_() for one in drawn]
    a, b, v = leaves
    output = attend(
        a.detach(), b.detach(), v, branches=Causal(), score=OwnFeatures(a, b), normalizer=Polynomial(order),
        documents=DOCUMENTS, backend=backend,
    ).output  # fmt: skip
    gradients = torch.autograd.grad(output, leaves, normal(2, 4, 37, 5, seed=5).to(dtype))
    return [one.detach().double() for one in (output, *gradients)]


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("chunk", [4, 7, 256])
def test_scan_is_as_accurate_as_all_pairs(order: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polynomial, "CHUNK", chunk)
    truth = results(order, torch.float64, "reference")
    plain, fast = (results(order, torch.float32, backend) for backend in ("reference", "native"))
    for true, known, found in zip(truth, plain, fast, strict=True):
        # Sums over chunks are taken in another order: a few roundings of the largest entry.
        allowed = 2 * max(float((known - true).abs().max()), 5e-7 * float(true.abs().max()))
        assert float((found - true).abs().max()) <= allowed


def test_backends_have_polynomials_or_refuse_them() -> None:
    q = k = v = torch.zeros(1, 1, 4, 8)
    score = OwnFeatures(q, k)
    with pytest.raises(UnavailableError, match="backend 'flex' has no kernel for the normalizer Polynomial"):
        attend(q, k, v, branches=Causal(), score=score, normalizer=Polynomial(1), backend="flex")
    with pytest.raises(UnavailableError, match="backend 'native' has polynomials of scores over every key only"):
        attend(q, k, v, branches=Window(2), score=score, normalizer=Polynomial(1), backend="native")


def test_work_is_counted_in_sums_that_go_on_where_they_are_fewer_than_keys() -> None:
    for order, rows in ((1, 129), (2, 8192.5 / 2)):
        mechanism = make_mechanism("fastmax", HeadShape(), order=order)
        assert work(mechanism, 8192).keys_read == pytest.approx(rows, rel=1e-3)
    assert work(make_mechanism("fastmax", HeadShape()), 64).keys_read == 32.5
