"""DESIGN.md section 3: the one-pass formulas for outputs and gradients agree with autograd through the reference.

With a soft window, branch m adds its own log-weight to the score, so exp(s_ij - lse_im) there becomes
p_imj = exp(s_ij + log c_imj - lse_im), with c_imj = clamp((z_i - x) / R, 0, 1) at distance x = i - j.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from varifocal import Branch, Causal, Prefix, SoftWindow, TopK, Window, attend

B, H, G, T, D = 2, 4, 2, 14, 6
EDGE, LIMIT = 3.0, 9
ROUNDING = 1e-12
"""Sums of at most 56 products of numbers near 1, in float64."""

DOCUMENTS = torch.tensor([[0] * 5 + [1] * 9, [-1] * 3 + [0] * 8 + [-1] * 3])
"""Two documents; and one with padding on both sides."""


@dataclass(frozen=True, eq=False)
class Tensors:
    """The leaves of a mixture, and the gradient that comes from above."""

    q: Tensor
    k: Tensor
    v: Tensor
    width: Tensor
    weights: Tensor
    upstream: Tensor


@dataclass(frozen=True, eq=False)
class Gradients:
    """What the formulas say."""

    output: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    weights: Tensor
    width: Tensor


Mixture = Callable[[Tensors], tuple[Branch, ...]]

MIXTURES: dict[str, Mixture] = {
    "window and causal": lambda t: (Window(4), Causal()),
    "soft window and causal": lambda t: (SoftWindow(t.width, edge=EDGE, limit=LIMIT), Causal()),
    "soft window and top-k": lambda t: (SoftWindow(t.width, edge=EDGE, limit=LIMIT), TopK()),
    "three branches": lambda t: (Window(2) | Prefix(1), TopK(scale=0.0, minimum=3), Causal()),
    "four branches": lambda t: (Window(1), Window(5), SoftWindow(t.width, edge=EDGE, limit=LIMIT), Causal()),
}
every_mixture = pytest.mark.parametrize("mixture", MIXTURES.values(), ids=MIXTURES.keys())
both_layouts = pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one document", "packed and padded"])


def draw(branches: int, *, low: float = EDGE, high: float = LIMIT) -> Tensors:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    q, k, v = normal(B, H, T, D), normal(B, G, T, D), normal(B, G, T, D)
    width = torch.rand(B, H, T, dtype=torch.float64, generator=generator) * (high - low) + low
    weights = torch.rand(B, H, T, branches, dtype=torch.float64, generator=generator)
    return Tensors(q, k, v, width.requires_grad_(), weights.requires_grad_(), normal(B, H, T, D).detach())


def by_autograd(tensors: Tensors, mixture: Mixture, documents: Tensor | None) -> Gradients:
    attended = attend(
        tensors.q,
        tensors.k,
        tensors.v,
        branches=mixture(tensors),
        weights=tensors.weights,
        documents=documents,
        backend="reference",
    )
    leaves = (tensors.q, tensors.k, tensors.v, tensors.weights, tensors.width)
    found = torch.autograd.grad(attended.output, leaves, tensors.upstream, allow_unused=True, materialize_grads=True)
    return Gradients(attended.output, *found)


def coefficients(branch: Branch, tensors: Tensors, documents: Tensor | None) -> Tensor:
    """c [B, H, T, T]: the weight with which a branch reads each key before the softmax, 0 where it does not."""
    i, j = torch.arange(T)[:, None], torch.arange(T)
    ids = torch.zeros(B, T, dtype=torch.int64) if documents is None else documents
    seen = (j <= i) & (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, None, :]  # [B, T, T]
    place = seen.sum(dim=2, keepdim=True) - 1  # of the query in its document: what it sees, less itself
    key_place = place - (i - j)
    seen = seen[:, None].expand(B, H, T, T)
    if isinstance(branch, SoftWindow):
        soft = ((tensors.width.detach()[..., None] - (i - j)) / EDGE).clamp(0, 1)
        return soft * (seen & (i - j < LIMIT))
    if isinstance(branch, TopK):
        selected = attend(tensors.q, tensors.k, tensors.v, branches=branch, documents=documents).selected[0]
        assert selected is not None
        taken = (selected[..., None] == j).any(dim=-2)
        return (seen & taken).double()
    if isinstance(branch, Causal):
        return seen.double()
    if isinstance(branch, Window):
        assert isinstance(branch.size, int)
        return (seen & (i - j < branch.size)).double()
    assert branch == Window(2) | Prefix(1)
    return (seen & ((i - j < 2) | (key_place < 1)[:, None])).double()


def by_formula(tensors: Tensors, mixture: Mixture, documents: Tensor | None) -> Gradients:
    """Section 3, line by line."""
    q, upstream, weights = tensors.q.detach(), tensors.upstream, tensors.weights.detach()
    k, v = (part.detach().repeat_interleave(H // G, dim=1) for part in (tensors.k, tensors.v))
    scale = 1 / math.sqrt(D)
    scores = scale * q @ k.mT  # s [B, H, T, T]
    a, score_gradient = torch.zeros_like(scores), torch.zeros_like(scores)
    weight_gradients, width_gradient = [], torch.zeros_like(tensors.width)
    from_value = upstream @ v.mT  # dO_i . v_j
    for m, branch in enumerate(mixture(tensors)):
        c = coefficients(branch, tensors, documents)
        mass = (c * scores.exp()).sum(dim=-1, keepdim=True)  # exp(lse_im); 0 where nothing is read
        p = torch.where(mass > 0, c * scores.exp() / mass, 0.0)
        branch_output = p @ v  # O_im
        dw = (upstream * branch_output).sum(dim=-1, keepdim=True)
        delta = weights[..., m, None] * dw
        a += weights[..., m, None] * p
        score_gradient -= p * delta
        weight_gradients.append(dw)
        if isinstance(branch, SoftWindow):
            # d log c / dz = 1 / (z - x), on the edge alone: 0 < c < 1.
            distance = torch.arange(T)[:, None] - torch.arange(T)
            on_edge = (c > 0) & (c < 1)
            slope = torch.where(on_edge, 1 / (tensors.width.detach()[..., None] - distance), 0.0)
            width_gradient += (p * (weights[..., m, None] * from_value - delta) * slope).sum(dim=-1)
    score_gradient += a * from_value
    return Gradients(
        output=a @ v,
        q=scale * score_gradient @ k,
        k=(scale * score_gradient.mT @ q).view(B, G, H // G, T, D).sum(dim=2),
        v=(a.mT @ upstream).view(B, G, H // G, T, D).sum(dim=2),
        weights=torch.cat(weight_gradients, dim=-1),
        width=width_gradient,
    )


@every_mixture
@both_layouts
@pytest.mark.parametrize("part", ["output", "q", "k", "v", "weights", "width"])
def test_formula_agrees_with_autograd(mixture: Mixture, documents: Tensor | None, part: str) -> None:
    tensors = draw(len(mixture(draw(1))))
    wanted = getattr(by_autograd(tensors, mixture, documents), part)
    found = getattr(by_formula(tensors, mixture, documents), part)
    torch.testing.assert_close(found, wanted, rtol=ROUNDING, atol=ROUNDING)


def test_width_gets_no_gradient_where_no_key_lies_on_the_edge() -> None:
    # Widths of 8 and an edge of 3: the edge lies at distances 6 and 7, so the first 6 queries see none of it.
    tensors = draw(2, low=8.0, high=8.0)
    gradient = by_autograd(tensors, MIXTURES["soft window and causal"], None).width
    assert bool((gradient[..., :6] == 0).all())
    assert bool((gradient[..., 6:] != 0).all())


def test_width_gets_the_same_gradient_whatever_lies_beyond_it() -> None:
    # A query's window ends before key 0, whose value may be anything.
    tensors = draw(1, low=EDGE, high=5.0)
    far = torch.zeros_like(tensors.v)
    far[:, :, 0] = 1e6
    changed = Tensors(tensors.q, tensors.k, tensors.v + far, tensors.width, tensors.weights, tensors.upstream)

    def width_gradient(given: Tensors) -> Tensor:
        return by_autograd(given, lambda t: (SoftWindow(t.width, edge=EDGE, limit=LIMIT),), None).width[..., 5:]

    assert torch.equal(width_gradient(changed), width_gradient(tensors))


def test_weight_gradient_is_the_same_for_branches_that_read_the_same() -> None:
    tensors = draw(2)
    gradient = by_autograd(tensors, lambda t: (Window(4), Causal()), None).weights
    assert torch.equal(gradient[..., :4, 0], gradient[..., :4, 1])
