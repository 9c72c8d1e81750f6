"""The indexer's divergence from native attention over the selection is the one that gathers the selected keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from varifocal import HeadShape, Indexer, TopK, Window, attend, make_mechanism
from varifocal.attention.backends import UnavailableError, prepare
from varifocal.equations.layout import make_layout
from varifocal.equations.problem import DivergenceProblem


def divergence(select: str, documents: Tensor | None, backend: str, dtype: torch.dtype) -> list[Tensor]:
    """The loss, and its gradients to the indexer's queries and keys."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    q, k, v = normal(2, 4, 50, 16), normal(2, 2, 50, 16), normal(2, 2, 50, 16)
    index_q, index_k = normal(2, 4, 50, 5).requires_grad_(), normal(2, 2, 50, 5).requires_grad_()
    indexer = Indexer(index_q, index_k)
    top_k = TopK(scale=1.5, select=select, block=4, indexer=indexer)  # type: ignore[arg-type]
    selected = attend(q, k, v, branches=top_k | Window(1), documents=documents, backend="reference").selected[0]
    assert selected is not None
    layout = make_layout(batch=2, queries=50, keys=50, documents=documents, positions=None, device=torch.device("cpu"))
    problem = DivergenceProblem(q=q, k=k, indexer=indexer, selected=selected, top_k=top_k, layout=layout)
    loss: Tensor = prepare(backend, problem, device="cpu")()
    return [loss.detach(), *torch.autograd.grad(loss, (index_q, index_k))]


@pytest.mark.parametrize("select", ["exact", "blocks"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ["auto", "flex"])
def test_value_and_gradients_are_those_of_gathered_keys(select: str, packed: bool, backend: str) -> None:
    # Documents of 20 and 27 tokens and padding on either side.
    documents = torch.tensor([[-1] * 3 + [0] * 20 + [1] * 27, [0] * 20 + [1] * 27 + [-1] * 3]) if packed else None
    truth = divergence(select, documents, "reference", torch.float64)
    for found, wanted in zip(divergence(select, documents, backend, torch.float32), truth, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-6)


def test_named_backend_that_cannot_find_the_divergence_says_so_and_does_not_fall_back() -> None:
    sentence = (
        r"backend 'native' finds an indexer's divergence from float32 tensors .* got q torch\.float64 on cpu; use"
    )
    with pytest.raises(UnavailableError, match=sentence):
        divergence("exact", None, "native", torch.float64)


def test_training_on_a_named_backend_that_cannot_find_the_divergence_is_refused() -> None:
    shape = HeadShape(model_width=12, heads=2, kv_heads=2, head_width=8)
    mechanism = make_mechanism("dynamic_sparse", shape, rank=9)
    x, q = torch.randn(1, 6, 12), torch.randn(1, 2, 6, 8)
    with pytest.raises(UnavailableError, match="at most 8 wide, got 2 heads of width 9; use backend='auto'"):
        mechanism(x, q, q, q, backend="native")
    assert mechanism(x, q, q, q).losses["indexer"] > 0
    assert mechanism.eval()(x, q, q, q, backend="native").losses == {}
