"""What the table of cases does not ask of the triton backend, in Triton's interpreter; in a pytest of its own:

TRITON_INTERPRET=1 pytest tests/gpu_check/one_pass_promises.py
"""

# ruff: noqa: E402

from __future__ import annotations

from typing import Any

from tests.gpu_check import interpreter

interpreter.start()
interpreter.fill_fresh_memory()

import pytest
import torch
from torch import Tensor

from tests.attention import test_sink_logit as sinks
from tests.cases import LONG, Case, Sizes, free_weights, head_scale, soft_window
from tests.gpu_check import cases
from varifocal import Causal, Prefix, SinkLogit, SoftWindow, Window, attend
from varifocal.equations.reference import attend_reference

TEXTS = ((-1,) * 3 + (0,) * 40 + (1,) * 70 + (-1,) * 2 + (2,) * 35,)

MORE = (
    Case(
        "four_branches",
        lambda source: (
            Causal(), Window(5) | Prefix(1), soft_window(2.0, 9.0, edge=2.0, limit=9)(source), Window((1, 3, 2, 4)),
        ),
        weights=free_weights,
    ),
    Case("not_nested", lambda source: (Window(3), Prefix(4), Window((2, 5, 2, 5))), weights=free_weights),
    Case("same_twice", lambda source: (Causal(), Causal()), weights=free_weights),
    Case(
        "long_texts",
        lambda source: (Window((20, 37)) | Prefix((3, 0)), Causal()),
        LONG, documents=TEXTS, score=head_scale, weights=free_weights,
    ),
    Case(
        "long_soft_texts",
        lambda source: (soft_window(16.0, 50.0, edge=16.0, limit=50)(source) | Prefix(2), Window(50) | Prefix(2)),
        LONG, documents=TEXTS,
    ),
    Case("longer_cache", lambda source: (Window(40) | Prefix(5), Causal()), Sizes(B=1, T=40, S=140, D=24)),
    Case(
        "scattered_positions",
        lambda source: (Window(20) | Prefix(5), Causal()),
        Sizes(B=1, T=40, S=150, D=16), documents=TEXTS, positions=tuple((37 * i + 5) % 150 for i in range(40)),
    ),
)  # fmt: skip


@pytest.mark.parametrize("case", MORE, ids=lambda case: case.name)
def test_more_cases_are_as_accurate_as_the_reference(case: Case) -> None:
    found = cases.hold(case, "triton", torch.float32)
    assert found.outcome == "right", found


@pytest.mark.parametrize("name", ["by head", "two", "soft window"])
def test_sink_logits_and_their_gradients(name: str) -> None:
    given, exact = sinks.inputs(torch.float32), sinks.inputs()
    parts = sinks.problem(name, given)
    found = attend(
        parts.q, parts.k, parts.v, branches=parts.branches, weights=parts.weights, normalizer=parts.normalizer,
        documents=sinks.DOCUMENTS, backend="triton",
    )  # fmt: skip
    wanted = attend_reference(sinks.problem(name, exact))
    torch.testing.assert_close(found.output.double(), wanted.output, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.logsumexp.double(), wanted.logsumexp, rtol=1e-4, atol=1e-5)
    for one, other in zip(sinks.gradients(found, given), sinks.gradients(wanted, exact), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-4)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, **parts: Any) -> list[Tensor]:
    """The output and the gradients of a mixture."""
    given = [one.detach().requires_grad_() for one in (q, k, v, weights)]
    found = attend(*given[:3], branches=(Window(9), Causal()), weights=given[3], backend="triton", **parts).output
    return [found.detach(), *torch.autograd.grad((found * numbers(*found.shape, seed=7)).sum(), given)]


def mixture(length: int = 40, heads: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (numbers(1, count, length, 16, seed=seed) for seed, count in enumerate((heads, 1, 1)))
    return q, k, v, numbers(1, heads, length, 2, seed=3).softmax(dim=-1)


def test_results_are_the_same_bit_for_bit() -> None:
    given = mixture()
    for one, other in zip(run(*given), run(*given), strict=True):
        assert torch.equal(one, other)


def test_padding_may_hold_anything() -> None:
    q, k, v, weights = mixture()
    documents = torch.tensor([[-1] * 4 + [0] * 20 + [1] * 14 + [-1] * 2])
    padding = documents[0] < 0
    clean = run(q, k, v, weights, documents=documents)
    for one in (q, k, v):
        one[:, :, padding] = float("nan")
    for one, other in zip(run(q, k, v, weights, documents=documents), clean, strict=True):
        assert torch.equal(one, other)


def test_heads_beside_each_other_in_memory_stay_so() -> None:
    q, k, v, weights = mixture()
    apart = run(q, k, v, weights)
    q, k, v = (one.transpose(1, 2).contiguous().transpose(1, 2) for one in (q, k, v))
    found = run(q, k, v, weights)
    assert found[0].transpose(1, 2).is_contiguous()
    for one, other in zip(found, apart, strict=True):
        assert torch.equal(one, other)


def test_it_is_one_operator_to_torch_compile() -> None:
    graphs: list[list[str]] = []

    def keep(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
        return module

    def step(q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> Tensor:
        return attend(q, k, v, branches=(Window(9), Causal()), weights=weights, backend="triton").output

    compiled = torch.compile(step, backend=keep, fullgraph=True, dynamic=True)
    for length in (40, 33, 70):
        given = mixture(length)
        torch.testing.assert_close(compiled(*given), step(*given))
    assert len(graphs) == 1, "a graph for each length"
    assert sum("triton_mixture" in target for target in graphs[0]) == 1, graphs[0]


def test_torch_finds_nothing_wrong_with_the_operator() -> None:
    from varifocal.kernels.triton.mixture import triton_mixture

    q, k, v, weights = (one.requires_grad_() for one in mixture(20))
    lists = ([9, 9, 1 << 30, 1 << 30], [0] * 4, [0, 0], [0.0, 0.0])
    torch.library.opcheck(
        triton_mixture, (q, k, v, weights, *(None,) * 6, 0.25, *lists, True),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static"),
    )  # fmt: skip


def test_autocast_rounds_what_goes_in() -> None:
    q, k, v, weights = mixture()
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(q, k, v, branches=(Window(9), Causal()), weights=weights, backend="triton").output
    narrow = (one.bfloat16() for one in (q, k, v))
    wanted = attend(*narrow, branches=(Window(9), Causal()), weights=weights, backend="triton").output
    assert found.dtype == torch.float32
    assert torch.equal(found, wanted.float())


def test_second_derivatives_are_refused_in_one_sentence() -> None:
    q = numbers(1, 1, 5, 16).requires_grad_()
    out = attend(q, q, q, branches=Causal(), backend="triton").output
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"triton_mixture cannot be differentiated twice; use backend='reference'"):
        torch.autograd.grad(gradient.sum(), q)


def test_a_sink_of_minus_infinity_is_softmax() -> None:
    q, k, v, weights = mixture()
    nothing = SinkLogit(torch.full((2,), float("-inf")))
    for one, other in zip(run(q, k, v, weights, normalizer=nothing), run(q, k, v, weights), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("case", ["plain", "texts", "soft", "sinks"])
def test_few_queries_read_their_keys_in_shares(case: str, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from varifocal.kernels.triton import mixture as operators

    counted: list[int] = []
    original = operators.read_in_shares

    def spy(*given: Any, shares: int, **parts: Any) -> None:
        counted.append(shares)
        original(*given, shares=shares, **parts)

    monkeypatch.setattr(operators, "read_in_shares", spy)
    q, k, v = numbers(2, 4, queries, 24), numbers(2, 2, 150, 24, seed=1), numbers(2, 2, 150, 24, seed=2)
    near: Any = Window((40, 7, 3, 90)) | Prefix(3)
    if case == "soft":
        near = SoftWindow(20 + 10 * numbers(2, 4, queries, seed=4).sigmoid(), edge=8, limit=30)
    parts: dict[str, Any] = {
        "branches": (near, Causal()),
        "weights": numbers(2, 4, queries, 2, seed=3),
        "documents": torch.tensor(TEXTS * 2) if case == "texts" else None,
        "normalizer": SinkLogit(numbers(4, seed=5)) if case == "sinks" else None,
    }
    with torch.no_grad():
        found = attend(q, k, v, backend="triton", **parts)
        wanted = attend(q, k, v, backend="reference", **parts)
    assert counted == [5]
    torch.testing.assert_close(found.output, wanted.output, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(found.logsumexp, wanted.logsumexp, rtol=1e-5, atol=2e-6)
