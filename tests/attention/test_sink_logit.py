"""A learned number in the sum of every softmax: a key without a value, in every backend, and gradients of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from varifocal import (
    Causal,
    Dot,
    HeadScale,
    HeadShape,
    PairGate,
    Prefix,
    SinkLogit,
    SoftWindow,
    TopK,
    Window,
    attend,
    lay_out,
    make_mechanism,
)
from varifocal.attention.backends import prepare
from varifocal.equations.problem import Attended, Problem
from varifocal.equations.reference import attend_reference
from varifocal.kernels.flex.backend import attend_flex
from varifocal.kernels.flex.dense import attend_dense

BATCH, HEADS, KV_HEADS, LENGTH, WIDTH = 2, 4, 2, 37, 8
DOCUMENTS = torch.tensor([[-1] * 5 + [0] * 20 + [1] * 12, [0] * 37])


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    made = {
        "q": normal(BATCH, HEADS, LENGTH, WIDTH, seed=0),
        "k": normal(BATCH, KV_HEADS, LENGTH, WIDTH, seed=1),
        "v": normal(BATCH, KV_HEADS, LENGTH, WIDTH, seed=2),
        "logit": torch.tensor([-3.0, 0.0, 1.5, 4.0], dtype=torch.float64),
        "weights": normal(BATCH, HEADS, LENGTH, 2, seed=3).softmax(dim=-1),
        "width": 4 + 5 * normal(BATCH, HEADS, LENGTH, seed=4).sigmoid(),
    }
    return {name: tensor.to(dtype).requires_grad_() for name, tensor in made.items()}


BRANCHES: dict[str, Any] = {
    "causal": lambda _: (Causal(),),
    "window and sinks": lambda _: (Window(6) | Prefix(2),),
    "by head": lambda _: (Window((None, 3, 3, 9)) | Prefix((0, 2, 2, 1)),),
    "soft window": lambda given: (SoftWindow(given["width"], edge=3, limit=9),),
    "two": lambda _: (Window(6) | Prefix(2), Causal()),
}


def problem(name: str, given: dict[str, Tensor], *, logit: Tensor | None = None, **parts: Any) -> Problem:
    branches = BRANCHES[name](given)
    q, k, v = (given[one] for one in "qkv")
    values = {
        "q": q, "k": k, "v": v, "branches": branches, "score": Dot(), "layout": lay_out(q, k, v, documents=DOCUMENTS),
        "weights": given["weights"] if len(branches) > 1 else None,
        "normalizer": SinkLogit(given["logit"] if logit is None else logit),
    }  # fmt: skip
    return Problem(**(values | parts))


def gradients(found: Attended, given: dict[str, Tensor]) -> list[Tensor | None]:
    cotangent = normal(*found.output.shape, seed=9).to(found.output.dtype)
    return list(torch.autograd.grad((found.output * cotangent).sum(), list(given.values()), allow_unused=True))


def test_it_is_a_key_whose_value_is_0() -> None:
    given = inputs()
    q, k, v = (given[one] for one in "qkv")
    output = attend(q, k, v, branches=Causal(), normalizer=SinkLogit(given["logit"]), backend="reference").output
    keys, values = (one.repeat_interleave(2, dim=1) for one in (k, v))
    scores = (q @ keys.mT / WIDTH**0.5).masked_fill(~torch.ones(LENGTH, LENGTH).tril().bool(), float("-inf"))
    sink = given["logit"][:, None, None].expand(BATCH, -1, LENGTH, 1)
    weights = torch.cat((sink, scores), dim=-1).softmax(dim=-1)[..., 1:]
    torch.testing.assert_close(output, weights @ values)


@pytest.mark.parametrize("backend", ["native", "flex"])
@pytest.mark.parametrize("name", BRANCHES)
def test_outputs_and_gradients_are_those_of_the_reference(name: str, backend: str) -> None:
    given, exact = inputs(torch.float32), inputs()
    if backend == "native":
        parts = problem(name, given)
        found = attend(
            parts.q, parts.k, parts.v, branches=parts.branches, weights=parts.weights, normalizer=parts.normalizer,
            documents=DOCUMENTS, backend="native",
        )  # fmt: skip
    else:
        found = attend_flex(problem(name, given), execute=attend_dense)
    wanted = attend_reference(problem(name, exact))
    torch.testing.assert_close(found.output.double(), wanted.output, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.logsumexp.double(), wanted.logsumexp, rtol=1e-4, atol=1e-5)
    for one, other in zip(gradients(found, given), gradients(wanted, exact), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert bool(one.isfinite().all())
            torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", BRANCHES)
def test_few_queries_of_a_cache_read_the_same(name: str) -> None:
    given = {key: one.detach() for key, one in inputs(torch.float32).items()}
    last = {key: one[:, :, -2:] if key in ("q", "weights", "width") else one for key, one in given.items()}
    for normalizer in (SinkLogit(given["logit"]), SinkLogit(torch.full((HEADS,), float("-inf")))):
        found, wanted = (
            attend(
                some["q"], some["k"], some["v"], branches=BRANCHES[name](some), normalizer=normalizer, backend=backend,
                weights=some["weights"] if name == "two" else None,
            ).output
            for some, backend in ((last, "native"), (given, "reference"))
        )  # fmt: skip
        torch.testing.assert_close(found, wanted[:, :, -2:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_minus_infinity_is_softmax(backend: str) -> None:
    given = inputs(torch.float32)
    q, k, v = (given[one] for one in "qkv")
    nothing = SinkLogit(torch.full((HEADS,), float("-inf")))
    found, plain = (
        attend(q, k, v, branches=Window(7), normalizer=one, backend=backend).output for one in (nothing, None)
    )
    assert torch.equal(found, plain)


def test_queries_without_keys_get_0_and_gradient_0() -> None:
    for backend, dtype in (("reference", torch.float64), ("native", torch.float32)):
        given = inputs(dtype)
        q, k, v = (given[one] for one in "qkv")
        found = attend(
            q, k, v, branches=Window(3), normalizer=SinkLogit(given["logit"]), documents=DOCUMENTS, backend=backend
        )
        blind = found.output[0, :, :5]
        assert not bool(blind.any())
        (gradient,) = torch.autograd.grad(blind.sum(), [given["logit"]], retain_graph=True)
        assert not bool(gradient.any())
        closed = SinkLogit(torch.full((HEADS,), float("-inf"), dtype=dtype))
        found = attend(q, k, v, branches=Window(3), normalizer=closed, documents=DOCUMENTS, backend=backend)
        assert not bool(found.output[0, :, :5].any())


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"branches": (TopK(scale=1.0, minimum=2),)}, "has sink logits over branches of windows and prefixes only"),
        ({"score": "pairs"}, "has sink logits over branches of windows and prefixes only, without a gate of pairs"),
    ],
    ids=str,
)
def test_what_the_kernels_do_not_have_is_refused(parts: dict[str, Any], reason: str) -> None:
    if parts.get("score") == "pairs":
        a, b = (normal(BATCH, HEADS, LENGTH, 3, seed=seed).float() for seed in (5, 6))
        parts = {"score": PairGate(a, b, output=torch.ones(HEADS, 3))}
    with pytest.raises(ValueError, match=reason):
        prepare("native", problem("causal", inputs(torch.float32), **parts), device="cpu")()


def test_logits_of_another_number_of_heads_are_refused() -> None:
    given = inputs()
    q, k, v = (given[one] for one in "qkv")
    with pytest.raises(ValueError, match=r"sink logits must have shape \[H\] with H = 4, got"):
        attend(q, k, v, branches=Causal(), normalizer=SinkLogit(torch.zeros(3, dtype=torch.float64)))


def test_scaled_heads_take_a_sink_too() -> None:
    given, exact = inputs(torch.float32), inputs()
    scale = torch.tensor([0.5, 1.0, 2.0, 0.1])
    found, wanted = (
        attend(
            some["q"], some["k"], some["v"], branches=Window(9), score=HeadScale(scale.to(some["q"].dtype)),
            normalizer=SinkLogit(some["logit"]), backend=backend,
        ).output
        for some, backend in ((given, "native"), (exact, "reference"))
    )  # fmt: skip
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "options"), [("local", {"window": LENGTH}), ("focused", {})])
def test_closed_sink_leaves_dense_attention(name: str, options: dict[str, Any]) -> None:
    shape = HeadShape(model_width=6, heads=HEADS, kv_heads=KV_HEADS, head_width=WIDTH)
    mechanism = make_mechanism(name, shape, sink_logit=True, **options)
    given = {key: one.detach() for key, one in inputs(torch.float32).items()}
    q, k, v = (given[one] for one in "qkv")
    dense = attend(q, k, v, branches=Causal()).output
    x = torch.zeros(BATCH, LENGTH, 6)
    assert not torch.allclose(mechanism(x, q, k, v).output, dense, atol=1e-3)
    mechanism.start_as_dense()
    torch.testing.assert_close(mechanism(x, q, k, v).output, dense, rtol=0.0, atol=1e-3)
