"""Corners of the native kernels: closed branches, ties, large scores, absurd sizes, odd strides, second derivatives."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from tests.fuzz.judgement import moving, tangent_of
from tests.fuzz.layouts import MEMORY_LAYOUTS
from varifocal import (
    Branch,
    Causal,
    Dot,
    Indexer,
    PairGate,
    Prefix,
    Segments,
    SoftWindow,
    TopK,
    Window,
    attend,
)
from varifocal.attention.attend import evaluate, lay_out
from varifocal.attention.backends import UnavailableError
from varifocal.equations.equation import Equation
from varifocal.equations.problem import PoolingProblem
from varifocal.kernels.native import library
from varifocal.kernels.native.backend import prepare as prepare_native
from varifocal.kernels.native.mixture import CAUSAL, MixtureBranch, mixture
from varifocal.kernels.steps.norm import norm
from varifocal.kernels.steps.swiglu import swiglu

pytestmark = pytest.mark.skipif(library.why_missing() is not None, reason="the native library was not built")

FORWARD_MODE = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
"""Torch warns of itself where it first meets a tangent."""

Step = Callable[[Tensor], Tensor]

BRANCHES: dict[str, Callable[[], Branch | tuple[Branch, ...]]] = {
    "mixture": lambda: (Window(3), Causal()),
    "top_k": lambda: TopK(),
    "top_k_blocks": lambda: TopK(select="blocks", block=4),
    "window_and_top_k": lambda: (Window(3), TopK()),
    "segments": lambda: Segments(4),
    "pair_gate": lambda: Causal(),
}
"""One for each kernel with gradients."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def options(name: str, q: Tensor) -> dict[str, Any]:
    """The arguments of attend for a row of BRANCHES."""
    branches = BRANCHES[name]()
    given: dict[str, Any] = {"branches": branches}
    if isinstance(branches, tuple):
        given["weights"] = torch.full((*q.shape[:3], 2), 0.5)
    if name == "pair_gate":
        queries, keys = (normal(*q.shape[:3], 3, seed=seed) for seed in (7, 8))
        given["score"] = PairGate(queries, keys, output=normal(q.shape[1], 3, seed=9))
    return given


def heads(length: int = 20, *, width: int = 8) -> list[Tensor]:
    """q, k and v that learn."""
    return [normal(2, h, length, width, seed=seed).requires_grad_() for seed, h in enumerate((4, 2, 2))]


@pytest.mark.parametrize("layout", MEMORY_LAYOUTS)
@pytest.mark.parametrize("name", BRANCHES)
def test_strides_change_no_output_and_no_gradient(name: str, layout: str) -> None:
    shapes = [(2, 4, 20, 8), (2, 2, 20, 8), (2, 2, 20, 8)]
    cut = MEMORY_LAYOUTS[layout]
    bases = [normal(*cut.base(*shape), seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]

    def run(plainly: bool) -> list[Tensor]:
        views = [cut.view(base, shape) for base, shape in zip(bases, shapes, strict=True)]
        q, k, v = (view.contiguous() if plainly else view for view in views)
        output = attend(q, k, v, backend="native", **options(name, q)).output
        upstream = cut.view(normal(*cut.base(*shapes[0]), seed=5), shapes[0])
        return [output, *torch.autograd.grad(output, bases, upstream)]

    for found, expected in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", [name for name, layout in MEMORY_LAYOUTS.items() if not layout.shares])
def test_strides_of_steps_and_means_change_nothing(layout: str) -> None:
    cut, shape = MEMORY_LAYOUTS[layout], (2, 4, 6, 8)
    base = normal(*cut.base(*shape)).requires_grad_()
    view, angles = cut.view(base, shape), (normal(1, 4, 8, seed=1), normal(1, 4, 8, seed=2))
    weight = torch.linspace(0.5, 2, 8)
    steps: tuple[Step, ...] = (
        lambda x: norm(x, weight, 1e-6, cosines=angles[0], sines=angles[1]),
        lambda x: swiglu(x, x.flip(1)),
    )
    for step in steps:
        found, expected = step(view), step(view.contiguous())
        assert torch.equal(found, expected)
        upstream = cut.view(normal(*cut.base(*shape), seed=5), shape)
        assert torch.equal(*(torch.autograd.grad(one, base, upstream)[0] for one in (found, expected)))
    layout_of_keys = attend_layout(2, 6)
    means = [torch.zeros(2, 4, 2, 8) for _ in range(2)]
    for one, keys in zip(means, (view, view.contiguous()), strict=True):
        run = prepare_native(PoolingProblem(one, keys, layout_of_keys, 3))
        assert not isinstance(run, str)
        run()
    assert torch.equal(*means)


def attend_layout(batch: int, keys: int) -> Any:
    x = torch.zeros(batch, 1, keys, 1)
    return lay_out(x, x, x)


@pytest.mark.parametrize("learns", [False, True])
def test_closed_soft_window_has_gradients_whatever_the_scores(learns: bool) -> None:
    q, k, v = heads(30)
    width = torch.full((2, 4, 30), 6.0, requires_grad=True)
    weights = torch.stack((torch.zeros(2, 4, 30), torch.ones(2, 4, 30)), dim=-1).requires_grad_(learns)

    def gradients(backend: str) -> tuple[Tensor, ...]:
        equation = Equation((SoftWindow(width, edge=2.0, limit=8), Causal()), weights)
        # As a mechanism runs it: nobody looks at the logsumexp, and a closed branch is left out.
        output = evaluate(
            equation, q * 263, k, v, layout=lay_out(q, k, v), backend=backend, wants_logsumexp=False
        ).output
        return torch.autograd.grad(output.square().sum(), (q, k, v, width))

    for found, expected in zip(gradients("native"), gradients("reference"), strict=True):
        assert bool(torch.isfinite(found).all())
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("queries", [1, 30])
@pytest.mark.parametrize("learns", [False, True])
def test_closed_branch_has_the_logsumexp_of_its_keys(queries: int, learns: bool) -> None:
    q, k, v = heads(30)
    q = q[:, :, -queries:]
    weights = torch.stack((torch.zeros(2, 4, queries), torch.ones(2, 4, queries)), dim=-1).requires_grad_(learns)
    for branches in ((Causal(), Window(5)), (Window(5), Causal()), (Window(5), TopK()), (TopK(), Prefix(2))):
        found, expected = (
            attend(q, k, v, branches=branches, weights=weights, backend=backend).logsumexp
            for backend in ("native", "reference")
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("branch", [TopK(), TopK(select="blocks", block=3)], ids=["keys", "blocks"])
def test_equal_scores_select_the_lowest_keys(branch: TopK) -> None:
    q, k, v = heads(40)
    found, expected = (
        attend(q, k, v, branches=branch, score=Dot(0.0), backend=backend) for backend in ("native", "reference")
    )
    assert found.selected[0] is not None
    assert expected.selected[0] is not None
    width = min(found.selected[0].shape[-1], expected.selected[0].shape[-1])
    assert torch.equal(found.selected[0][..., :width], expected.selected[0][..., :width])
    torch.testing.assert_close(found.output, expected.output)


@pytest.mark.parametrize("name", ["top_k", "top_k_blocks", "window_and_top_k", "mixture", "segments"])
def test_large_scores_cost_no_digits(name: str) -> None:
    q, k, v = heads(40)

    def gradient(dtype: torch.dtype, backend: str) -> Tensor:
        # One key wins everywhere, by far: its value gets the gradient of the output, whole.
        parts = [(part.detach() * factor).to(dtype) for part, factor in ((q, 1e6), (k, 1), (v, 1))]
        parts[2].requires_grad_()
        output = attend(*parts, backend=backend, **options(name, q)).output
        (found,) = torch.autograd.grad(output.sum(), parts[2])
        return found

    exact = gradient(torch.float64, "reference")
    assert (gradient(torch.float32, "native") - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("name", BRANCHES)
def test_second_derivatives_are_refused_in_one_sentence(name: str) -> None:
    leaves = heads()
    output = attend(*leaves, backend="native", **options(name, leaves[0])).output
    first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
    # What the loss itself depends on hides a gradient that was dropped: it has one of its own.
    with pytest.raises(RuntimeError, match=r"^varifocal::\w+ cannot be differentiated twice; use backend='reference'$"):
        torch.autograd.grad(first[0].square().sum() + output.sum(), leaves)
    again = attend(*leaves, backend="native", **options(name, leaves[0])).output
    constant = torch.autograd.grad(again, leaves, torch.ones_like(again), create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(constant[2].square().sum() + again.sum(), leaves)


def test_second_derivatives_of_steps_are_refused_in_one_sentence() -> None:
    x, weight = normal(2, 3, 8).requires_grad_(), torch.linspace(0.5, 2, 8)
    steps: tuple[Step, ...] = (lambda x: norm(x, weight, 1e-6), lambda x: swiglu(x, x))
    for step in steps:
        (first,) = torch.autograd.grad(step(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated twice; run the model in float64"):
            torch.autograd.grad(first.square().sum() + x.sum(), x)


@FORWARD_MODE
@pytest.mark.parametrize("name", BRANCHES)
def test_tangents_go_through_attend(name: str) -> None:
    q, k, v = (part.detach() for part in heads())

    def tangent(backend: str) -> Tensor:
        with forward_ad.dual_level():
            moved = moving(q, normal(*q.shape, seed=4))
            return tangent_of(attend(moved, k, v, backend=backend, **options(name, q)).output).clone()

    torch.testing.assert_close(tangent("auto"), tangent("reference"))
    with pytest.raises(UnavailableError, match="backend 'native' takes no part in forward-mode derivatives"):
        tangent("native")


@FORWARD_MODE
def test_operator_does_not_drop_a_tangent() -> None:
    q, k, v = (part.detach() for part in heads())
    position = torch.arange(20, dtype=torch.int32).repeat(2, 1)
    with forward_ad.dual_level():
        moved = moving(q, torch.ones_like(q))
        with pytest.raises(RuntimeError, match=r"^varifocal::mixture has no forward-mode derivative; use backend="):
            mixture(
                moved, k, v,
                branches=[MixtureBranch(window=CAUSAL)], position=position, start=torch.zeros_like(position),
            )  # fmt: skip


def test_transforms_of_torch_see_the_gradient() -> None:
    q, k, v = (part.detach() for part in heads())

    def total(q: Tensor) -> Tensor:
        return attend(q, k, v, branches=Causal()).output.square().sum()

    leaf = q.clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(total)(q), torch.autograd.grad(total(leaf), leaf)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BRANCHES)
def test_autocast_answers_in_the_type_of_the_queries(name: str, dtype: torch.dtype) -> None:
    q, k, v = (part.detach().to(dtype) for part in heads())
    for backend in ("native", "reference"):
        with torch.autocast("cpu", torch.bfloat16):
            found = attend(q, k, v, backend=backend, **options(name, q)).output
        assert found.dtype == dtype
        expected = attend(q, k, v, backend=backend, **options(name, q)).output
        tolerance = 1e-6 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "branch",
    [
        Segments(10**8),
        TopK(select="blocks", block=10**8),
        TopK(select="blocks", block=10**12),
        TopK(scale=1e300, minimum=10**30),
        SoftWindow(torch.full((2, 4, 20), 9.0), edge=2.0, limit=2**32),
        Window(10**12) | Prefix(10**12),
    ],
    ids=repr,
)
def test_absurd_sizes_take_the_memory_of_the_text(branch: Branch) -> None:
    leaves = heads()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found, expected = (
        (output := attend(*leaves, branches=branch, backend=backend).output, *torch.autograd.grad(output.sum(), leaves))
        for backend in ("native", "reference")
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KB


def test_segments_of_uneven_documents_take_the_memory_of_the_text() -> None:
    # One long document and many of a token: laid out as a rectangle, segments would take 1000 times the text.
    length = 2000
    q, k, v = (normal(1, 2, length, 16, seed=seed).requires_grad_() for seed in range(3))
    documents = torch.cat((torch.zeros(length // 2, dtype=torch.int64), torch.arange(1, length // 2 + 1)))[None]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = attend(q, k, v, branches=Segments(10**8), documents=documents, backend="native")
    gradients = torch.autograd.grad(found.output.sum(), (q, k, v))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
    expected = attend(q, k, v, branches=Causal(), documents=documents, backend="native").output
    torch.testing.assert_close(found.output, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients, torch.autograd.grad(expected.sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def gate(units: int, q: Tensor) -> PairGate:
    return PairGate(torch.ones(*q.shape[:3], units), torch.ones(*q.shape[:3], units), torch.ones(q.shape[1], units))


def indexed(rank: int, q: Tensor) -> TopK:
    return TopK(indexer=Indexer(torch.ones(*q.shape[:3], rank), torch.ones(*q.shape[:3], rank)))


@pytest.mark.parametrize(
    ("shape", "given", "reason"),
    [
        ((1, 1, 3, 4097), lambda q: {"branches": Causal()}, "runs heads of 1 to 4096 channels, got 4097"),
        ((1, 1, 3, 4097), lambda q: {"branches": TopK()}, "runs heads of 1 to 4096 channels, got 4097"),
        ((1, 2, 3, 8), lambda q: {"branches": Causal(), "score": gate(0, q)}, "1 to 1024 units, got 0"),
        ((1, 2, 3, 8), lambda q: {"branches": Causal(), "score": gate(1025, q)}, "1 to 1024 units, got 1025"),
        ((1, 2, 3, 8), lambda q: {"branches": indexed(0, q)}, "runs indexers of 1 to 4096 channels, got 0"),
    ],
    ids=["wide_head", "wide_head_top_k", "gate_of_0", "gate_of_1025", "rank_0"],
)
def test_auto_takes_the_reference_where_the_kernels_cannot(
    shape: tuple[int, ...], given: Callable[[Tensor], dict[str, Any]], reason: str
) -> None:
    q = normal(*shape)
    found, expected = (attend(q, q, q, backend=backend, **given(q)).output for backend in ("auto", "reference"))
    assert torch.equal(found, expected)
    with pytest.raises(UnavailableError, match=reason):
        attend(q, q, q, backend="native", **given(q))


@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0), (0, 0)])
def test_nothing_goes_in_and_nothing_comes_out(name: str, batch: int, length: int) -> None:
    q, k, v = (torch.zeros(batch, 2, length, 8, requires_grad=True) for _ in range(3))
    for documents in (None, torch.zeros(batch, length, dtype=torch.int64)):
        output = attend(q, k, v, documents=documents, **options(name, q)).output
        assert output.shape == q.shape
        assert [x.shape for x in torch.autograd.grad(output.sum(), (q, k, v))] == [q.shape] * 3
