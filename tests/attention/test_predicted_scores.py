"""The literal reading of dynamic sparse attention: scores predicted from the layer's input, by squared error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.attention.mechanisms import SHAPE
from varifocal import make_mechanism
from varifocal.attention.attend import lay_out
from varifocal.attention.mechanisms.dynamic_sparse import DynamicSparse
from varifocal.equations import squared_error
from varifocal.equations.squared_error import mean_squared_product

LENGTH = 23


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("chunk", [4, 7, 256])
@pytest.mark.parametrize("packed", [False, True])
def test_squares_of_all_pairs_are_summed_without_writing_them_out(
    chunk: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(squared_error, "CHUNK", chunk)
    a, b = normal(2, 4, LENGTH, 5, seed=0).requires_grad_(), normal(2, 2, LENGTH, 5, seed=1).requires_grad_()
    documents = torch.tensor([[-1] * 3 + [0] * 11 + [1] * 9, [0] * LENGTH]) if packed else None
    layout = lay_out(a, b, b, documents=documents)
    products = a @ b.repeat_interleave(2, dim=1).mT
    visible = layout.visible()[:, None].expand_as(products)
    wanted = products.square()[visible].mean()
    found = mean_squared_product(a, b, layout)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found, (a, b)), torch.autograd.grad(wanted, (a, b)))


def literal(**options: object) -> DynamicSparse:
    torch.manual_seed(3)
    made = make_mechanism("dynamic_sparse", SHAPE, prediction="input", rank=4, **options)
    assert isinstance(made, DynamicSparse)
    return made.double()


def test_projection_is_random_signs_that_nothing_trains() -> None:
    made = literal()
    assert made.projection is not None
    assert set((made.projection / (3 / 4) ** 0.5).round(decimals=4).unique().tolist()) == {-1.0, 0.0, 1.0}
    assert "projection" not in dict(made.named_parameters())
    assert "projection" in made.state_dict()


def test_predictions_come_from_the_input_alone_and_learn_the_scores() -> None:
    made = literal()
    x = normal(2, LENGTH, SHAPE.model_width, seed=0)
    # Queries and keys that follow from the input, as a model's do.
    to_q, to_k = normal(SHAPE.model_width, 24, seed=1), normal(SHAPE.model_width, 12, seed=2)
    q = (x @ to_q).unflatten(2, (4, 6)).transpose(1, 2) * 0.3  # type: ignore[no-untyped-call]
    k = (x @ to_k).unflatten(2, (2, 6)).transpose(1, 2) * 0.3  # type: ignore[no-untyped-call]
    v = normal(2, 2, LENGTH, 6, seed=3)
    chosen = made(x, q, k, v).records["selected"]
    assert torch.equal(chosen, made(x, -q, k.flip(2), v).records["selected"])
    optimizer = torch.optim.Adam(made.parameters(), lr=0.05)
    losses = []
    for _ in range(60):
        loss = made(x, q, k, v).losses["indexer"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_loss_is_the_mean_squared_error_of_the_scores_and_reaches_the_indexer_alone() -> None:
    made = literal(divergence=0.5)
    leaves = [
        normal(2, LENGTH, SHAPE.model_width, seed=0), normal(2, 4, LENGTH, 6, seed=1), normal(2, 2, LENGTH, 6, seed=2),
        normal(2, 2, LENGTH, 6, seed=3),
    ]  # fmt: skip
    leaves = [one.requires_grad_() for one in leaves]
    x, q, k, v = leaves
    loss = made(x, q, k, v).losses["indexer"]
    assert made.projection is not None
    base = x @ made.projection.mT
    index_keys = torch.einsum("btr,gsr->bgts", base, made.key_weight).bfloat16().double().repeat_interleave(2, dim=1)
    predicted = torch.einsum("btr,hsr->bhts", base, made.query_weight) @ index_keys.mT
    error = (q @ k.repeat_interleave(2, dim=1).mT / 6**0.5 - predicted).square()
    visible = torch.ones(LENGTH, LENGTH).tril().bool()
    torch.testing.assert_close(loss, 0.5 * error[..., visible].mean())
    gradients = torch.autograd.grad(loss, [*leaves, *made.parameters()], allow_unused=True)
    assert all(one is None for one in gradients[:4])
    assert all(one is not None and bool(one.any()) for one in gradients[4:])


def test_a_prediction_of_another_kind_is_told() -> None:
    with pytest.raises(ValueError, match="prediction must be 'heads' or 'input', got 'x'"):
        make_mechanism("dynamic_sparse", SHAPE, prediction="x")
