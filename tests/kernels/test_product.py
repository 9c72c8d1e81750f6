"""Products by oneDNN: the same numbers as torch's own products, with every gradient, and no slow way round."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from varifocal.kernels.steps import product
from varifocal.model.loss import linear_cross_entropy
from varifocal.model.steps import fed_forward, projected

SIZES = [(1, 64, 17, 33), (2, 40, 24, 120), (3, 1, 96, 8)]


@pytest.fixture(autouse=True)
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    if not product.has_onednn():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(product, "library", lambda: "onednn")
    monkeypatch.setattr(product, "SMALLEST", 0)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), requires_grad=True)


def gradients(output: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output, inputs, torch.ones_like(output).cumsum(-1))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("biased", [False, True])
def test_linear_is_torchs_with_every_gradient(sizes: tuple[int, int, int, int], biased: bool) -> None:
    batch, length, width, out = sizes
    x, weight, bias = random(batch, length, width), random(out, width), random(out) if biased else None
    ours, theirs = product.linear(x, weight, bias), linear(x, weight, bias)
    torch.testing.assert_close(ours, theirs)
    inputs = (x, weight) if bias is None else (x, weight, bias)
    for mine, other in zip(gradients(ours, inputs), gradients(theirs, inputs), strict=True):
        torch.testing.assert_close(mine, other, atol=2e-4, rtol=1e-5)


def test_linear_has_second_derivatives() -> None:
    x, weight = random(5, 4), random(3, 4)

    def squared_gradient(run: object) -> Tensor:
        (first,) = torch.autograd.grad(run(x, weight).pow(3).sum(), x, create_graph=True)  # type: ignore[operator]
        return torch.autograd.grad(first.pow(2).sum(), weight)[0]

    torch.testing.assert_close(squared_gradient(product.linear), squared_gradient(linear), atol=0, rtol=1e-5)


@pytest.mark.parametrize("frozen", [(), ("gate", "up"), ("weight",)])
def test_gated_linear_is_silu_times_up_projected(frozen: tuple[str, ...]) -> None:
    tensors = {"gate": random(2, 9, 48), "up": random(2, 9, 48), "weight": random(16, 48)}
    for name in frozen:
        tensors[name] = tensors[name].detach()
    ours = product.gated_linear(**tensors)
    theirs = linear(silu(tensors["gate"]) * tensors["up"], tensors["weight"])
    torch.testing.assert_close(ours, theirs)
    inputs = tuple(one for one in tensors.values() if one.requires_grad)
    for mine, other in zip(gradients(ours, inputs), gradients(theirs, inputs), strict=True):
        torch.testing.assert_close(mine, other, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("classes", [50, 9000])
def test_loss_is_the_same_by_either_library(classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = random(300, 24), random(classes, 24)
    labels = torch.arange(300) % classes
    ours = linear_cross_entropy(hidden, weight, labels)
    found = torch.autograd.grad(ours, (hidden, weight))
    monkeypatch.setattr(product, "library", lambda: "mkl")
    theirs = linear_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(found, torch.autograd.grad(theirs, (hidden, weight)), atol=1e-5, rtol=1e-5)


def test_weight_with_gaps_goes_another_way() -> None:
    """oneDNN has plain loops for it, a thousand times slower than a product."""
    wide = torch.randn(32, 64)
    assert not product.is_faster(torch.randn(8, 32), wide[:, :32])
    with pytest.raises(AssertionError):
        product.multiply(torch.randn(8, 32), wide[:, :32])


def test_hooks_adapters_and_other_types_are_called() -> None:
    module, x = nn.Linear(32, 32), torch.randn(4, 32)
    seen = []
    handle = module.register_forward_hook(lambda *_: seen.append("called"))
    projected(module, x)
    assert seen == ["called"]
    handle.remove()
    assert projected(module.double(), x.double()).dtype == torch.float64
    assert not product.is_faster(x, module.weight)


def test_feed_forward_keeps_gate_and_up_alone() -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    from varifocal.model import preset

    module, x = Qwen3MLP(preset("tiny")), random(1, 64, 128)
    kept: list[tuple[int, ...]] = []

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = fed_forward(module, x)
    assert sorted(kept) == [(64, 128), (64, 128), (64, 384), (64, 384)], "x for two products, gate and up"
    torch.testing.assert_close(found, module(x))


def test_unknown_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("VARIFOCAL_PRODUCTS", "blas")
    product.library.cache_clear()
    with pytest.raises(ValueError, match="VARIFOCAL_PRODUCTS must be mkl or onednn, got 'blas'"):
        product.library()
    for name in ("mkl", "onednn"):
        monkeypatch.setenv("VARIFOCAL_PRODUCTS", name)
        product.library.cache_clear()
        assert product.library() == name
    monkeypatch.undo()
    product.library.cache_clear()
