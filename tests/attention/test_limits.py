"""Limits that pin the mathematics: where one attention must become another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention.mechanisms import Tokens, small_mechanism, tokens
from varifocal import (
    Branch,
    Causal,
    Dot,
    HeadScale,
    Mechanism,
    PairGate,
    Prefix,
    RandomBlocks,
    Segments,
    SoftWindow,
    Strided,
    TopK,
    Window,
    attend,
)

ROUNDING = 1e-12
"""float64: at most 14 numbers near 1, added in another order or scaled by a gate and its complement."""

Run = Callable[[Tokens], Tensor]


def dense(part: Tokens) -> Tensor:
    return attend(part.q, part.k, part.v, branches=Causal()).output


def of(mechanism: Mechanism[Any]) -> Run:
    return lambda part: mechanism(*part).output


def reading(branches: Branch | tuple[Branch, ...], **options: Any) -> Run:
    return lambda part: attend(part.q, part.k, part.v, branches=branches, **options).output


def assert_same(left: Run, right: Run, *, exactly: bool = False) -> None:
    """Both give the same output and the same gradients of q, k and v."""
    rounding = 0.0 if exactly else ROUNDING
    example = tokens()
    upstream = torch.randn(example.q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    results = []
    for run in (left, right):
        output = run(example)
        results.append((output, *torch.autograd.grad(output, (example.q, example.k, example.v), upstream)))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=rounding, atol=rounding)


OPEN, CLOSED = {"kind": "constant", "start": 1000.0}, {"kind": "constant", "start": -1000.0}
"""Gates of exactly 1 and exactly 0."""


def test_head_gated_with_gate_1_is_its_window_alone() -> None:
    assert_same(of(small_mechanism("head_gated", gate=OPEN)), reading(Window(3)), exactly=True)


def test_head_gated_with_gate_0_is_dense() -> None:
    assert_same(of(small_mechanism("head_gated", gate=CLOSED)), dense, exactly=True)


def test_context_adaptive_with_gate_1_is_its_window_alone() -> None:
    both = small_mechanism("context_adaptive", gate=OPEN)
    alone = small_mechanism("context_adaptive", reads="local")
    assert_same(of(both), of(alone), exactly=True)


def test_context_adaptive_with_gate_0_is_its_top_k_alone() -> None:
    both = small_mechanism("context_adaptive", gate=CLOSED)
    alone = small_mechanism("context_adaptive", reads="global")
    assert_same(of(both), of(alone), exactly=True)


def test_weights_of_one_and_zero_leave_one_branch() -> None:
    weights = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(2, 4, 12, 2)
    assert_same(reading((Window(3), Causal()), weights=weights), reading(Window(3)), exactly=True)


@pytest.mark.parametrize("size", [12, 13, 1000])
def test_window_as_long_as_the_text_is_dense(size: int) -> None:
    assert_same(reading(Window(size)), dense, exactly=True)


@pytest.mark.parametrize("select", ["exact", "blocks"])
@pytest.mark.parametrize("minimum", [12, 1000])
@pytest.mark.parametrize("block", [1, 5, 12, 64])
def test_k_as_long_as_the_text_is_dense(select: Any, minimum: int, block: int) -> None:
    assert_same(reading(TopK(minimum=minimum, select=select, block=block)), dense, exactly=True)


def test_soft_window_beyond_the_text_is_dense() -> None:
    width = torch.full((2, 4, 12), 14.0, dtype=torch.float64)
    # Weight 1 up to distance 14 - 3 = 11, which the farthest key has.
    assert_same(reading(SoftWindow(width, edge=3.0, limit=14)), dense, exactly=True)


def test_prefix_as_long_as_the_text_is_dense() -> None:
    assert_same(reading(Prefix(12)), dense, exactly=True)


def test_stride_1_is_dense() -> None:
    assert_same(reading(Strided(1)), dense, exactly=True)


@pytest.mark.parametrize("length", [12, 64])
def test_one_segment_is_dense(length: int) -> None:
    assert_same(reading(Segments(length)), dense, exactly=True)


@pytest.mark.parametrize(
    "branch",
    [Window(3), Prefix(2), Strided(4), RandomBlocks(2, block=2), TopK(), TopK(select="blocks", block=2)],
    ids=repr,
)
def test_union_with_causal_is_dense(branch: Branch) -> None:
    assert_same(reading(branch | Causal()), dense, exactly=True)


def test_union_of_a_soft_window_with_causal_is_dense_and_its_width_gets_no_gradient() -> None:
    width = torch.full((2, 4, 12), 4.5, dtype=torch.float64, requires_grad=True)
    assert_same(reading(SoftWindow(width, edge=3.0, limit=8) | Causal()), dense, exactly=True)
    (gradient,) = torch.autograd.grad(reading(SoftWindow(width, edge=3.0, limit=8) | Causal())(tokens()).sum(), width)
    assert bool((gradient == 0).all())


def test_mixture_of_equals_with_convex_weights_is_one_of_them() -> None:
    weights = torch.rand(2, 4, 12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)
    assert_same(reading((Window(12), Causal(), TopK(minimum=12)), weights=weights), dense)


def test_head_scale_of_1_is_dense() -> None:
    assert_same(reading(Causal(), score=HeadScale(torch.ones(4, dtype=torch.float64))), dense)


def test_score_scale_of_0_takes_the_mean_of_the_values() -> None:
    example = tokens()
    output = reading(Causal(), score=Dot(0.0))(example)
    means = example.v.cumsum(dim=2) / torch.arange(1, 13)[:, None]
    torch.testing.assert_close(output, means.repeat_interleave(2, dim=1), rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dense", {}),
        ("local", {"window": 12, "sinks": 0}),
        ("local", {"window": 1, "sinks": 12}),
        ("combiner", {"segment": 12}),
        ("dynamic_sparse", {"k_min": 12}),
        ("dynamic_sparse", {"k_min": 12, "select": "blocks", "block": 2}),
        ("context_adaptive", {"window_min": 14, "window_max": 20, "edge": 2, "k_min": 12}),
        ("context_adaptive", {"reads": "global", "k_min": 12, "select": "blocks", "block": 5}),
        ("context_adaptive", {"reads": "local", "window_min": 14, "window_max": 14, "edge": 2}),
        ("head_gated", {"window": 12}),
        ("sparse_geometric", {"sparsity": "none", "scaling": False}),
        ("sparse_geometric", {"sparsity": "fixed", "scaling": False, "stride": 12}),
        ("sparse_geometric", {"sparsity": "fixed", "scaling": False, "stride": 1}),
        ("bigbird", {"window": 12}),
        ("sparse_transformer", {"stride": 12}),
        ("sparse_transformer", {"stride": 1}),
        ("focused", {"windows": ()}),
        ("focused", {"windows": (None, 12), "sinks": 0}),
        ("focused", {"windows": (12,), "sinks": 0}),
    ],
    ids=str,
)
def test_mechanism_is_dense_in_its_limit(name: str, options: dict[str, Any]) -> None:
    assert_same(of(small_mechanism(name, **options)), dense)


def constant_pair_gate(logit: float, form: Any) -> PairGate:
    hidden = torch.zeros(2, 4, 12, 3, dtype=torch.float64)
    bias = torch.full((4,), logit, dtype=torch.float64)
    return PairGate(hidden, hidden, torch.zeros(4, 3, dtype=torch.float64), bias=bias, form=form)


@pytest.mark.parametrize("form", ["product", "log", "threshold"])
def test_open_pair_gates_are_dense(form: str) -> None:
    assert_same(reading(Causal(), score=constant_pair_gate(1000.0, form)), dense)


def test_paper_form_with_gates_of_one_half_only_halves_the_scores() -> None:
    half = Dot(0.5 * 6**-0.5)
    assert_same(reading(Causal(), score=constant_pair_gate(0.0, "product")), reading(Causal(), score=half))


def test_paper_form_with_closed_gates_flattens_attention() -> None:
    assert_same(reading(Causal(), score=constant_pair_gate(-1000.0, "product")), reading(Causal(), score=Dot(0.0)))


def test_additive_form_with_equal_gates_is_dense() -> None:
    assert_same(reading(Causal(), score=constant_pair_gate(-3.0, "log")), dense)


def test_threshold_form_with_closed_gates_reads_nothing() -> None:
    output = reading(Causal(), score=constant_pair_gate(-3.0, "threshold"))(tokens())
    assert bool((output == 0).all())


def test_sparse_geometric_starts_with_a_scale_of_1() -> None:
    mechanism = small_mechanism("sparse_geometric", sparsity="none")
    mechanism.reset_parameters()
    # softplus of log(e - 1), rounded to float32 on the way.
    example = tokens()
    torch.testing.assert_close(mechanism(*example).output, dense(example), rtol=1e-6, atol=1e-6)
