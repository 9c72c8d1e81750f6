"""The indexer's divergence from native attention over the choice is the one that gathers the chosen keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from varifocal.attention.mechanisms.indexer_loss import indexer_divergence

from varifocal import Indexer, TopK, Window, attend
from varifocal.equations.layout import make_layout


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
    loss = indexer_divergence(q, k, indexer, selected, top_k, layout, backend=backend)
    return [loss.detach(), *torch.autograd.grad(loss, (index_q, index_k))]


@pytest.mark.parametrize("select", ["exact", "blocks"])
@pytest.mark.parametrize("packed", [False, True])
def test_value_and_gradients_are_those_of_gathered_keys(select: str, packed: bool) -> None:
    # Documents of 20 and 27 tokens and padding on either side.
    documents = torch.tensor([[-1] * 3 + [0] * 20 + [1] * 27, [0] * 20 + [1] * 27 + [-1] * 3]) if packed else None
    truth = divergence(select, documents, "reference", torch.float64)
    for found, wanted in zip(divergence(select, documents, "auto", torch.float32), truth, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-6)
