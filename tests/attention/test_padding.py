"""Padding: it reads nothing, gets no gradient, and whatever it holds stays in it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.attention.mechanisms import OPTIONS, Tokens, small_mechanism, tokens
from tests.cases import CASES, Case, Inputs

PADDED = [case for case in CASES if case.documents is not None and any(-1 in row for row in case.documents)]
padded_case = pytest.mark.parametrize("case", PADDED, ids=lambda case: case.name)


def padding(case: Case) -> tuple[Tensor, Tensor]:
    """Which queries [B, T] and which keys [B, S] are padding."""
    documents = torch.tensor(case.documents)
    positions = torch.arange(case.sizes.S - case.sizes.T, case.sizes.S)
    if case.positions is not None:
        positions = torch.tensor(case.positions)
    padded_key = documents < 0
    return padded_key.gather(1, positions.expand(case.sizes.B, case.sizes.T)), padded_key


def padding_masks(inputs: Inputs) -> dict[str, Tensor]:
    """For each tensor that has a row for every query or key: which of its entries belong to padding."""
    padded_query, padded_key = padding(inputs.case)
    of_queries = ("q", "pair_queries", "index_queries")
    of_keys = ("k", "v", "pair_keys", "index_keys", "segment_queries")
    sides = dict.fromkeys(of_queries, padded_query) | dict.fromkeys(of_keys, padded_key)
    return {
        name: side[:, None, :, None].expand_as(inputs.tensors[name])
        for name, side in sides.items()
        if name in inputs.tensors
    }


@padded_case
def test_query_that_sees_nothing_gets_exactly_0(case: Case) -> None:
    attended = case.make(torch.float64).attend()
    blind = padding(case)[0][:, None].expand(attended.output.shape[:3])
    assert bool((attended.output[blind] == 0).all())
    assert bool((attended.logsumexp[blind] == float("-inf")).all())
    for selected in attended.selected:
        assert selected is None or bool((selected[blind] == -1).all())


@padded_case
def test_padding_gets_a_gradient_of_exactly_0(case: Case) -> None:
    inputs = case.make(torch.float64)
    output = inputs.attend().output
    masks = padding_masks(inputs)
    upstream = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    gradients = dict(zip(inputs.leaves, torch.autograd.grad(output, inputs.leaf_tensors(), upstream), strict=True))
    for name, gradient in gradients.items():
        if name in masks:
            assert bool((gradient[masks[name]] == 0).all()), name
    blind = padding(case)[0][:, None].expand(output.shape[:3])
    for name in ("weights", "width"):
        if name in gradients:
            assert bool((gradients[name][blind] == 0).all()), name


@padded_case
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
def test_nan_and_infinity_in_padding_do_not_spread(case: Case, poison: float) -> None:
    clean = case.make(torch.float64)
    masks = padding_masks(clean)
    assert {"q", "k", "v"} <= masks.keys()
    dirty = clean.rebuild(
        {
            name: clean.tensors[name].detach().masked_fill(mask, poison).requires_grad_(name in clean.leaves)
            for name, mask in masks.items()
        }
    )
    upstream = torch.randn(clean.q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    results = []
    for inputs in (clean, dirty):
        attended = inputs.attend()
        gradients = torch.autograd.grad(attended.output, inputs.leaf_tensors(), upstream)
        selected = [part for part in attended.selected if part is not None]
        results.append((attended.output, attended.logsumexp, *selected, *gradients))
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", OPTIONS)
def test_nan_in_padded_keys_values_and_queries_does_not_reach_a_mechanism(name: str) -> None:
    documents = torch.tensor([[-1] * 3 + [0] * 9, [0] * 4 + [1] * 6 + [-1] * 2])
    mechanism = small_mechanism(name)
    clean = tokens()
    hole = (documents < 0)[:, None, :, None]
    poisoned = (part.detach().masked_fill(hole, float("nan")).requires_grad_() for part in clean[1:])
    dirty = Tokens(clean.x, *poisoned)
    upstream = torch.randn(clean.q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    results = []
    for side in (clean, dirty):
        answer = mechanism(*side, documents=documents)
        loss = (answer.output * upstream).sum() + sum(answer.losses.values())
        learns = (*side, *mechanism.parameters())
        gradients = torch.autograd.grad(loss, learns, allow_unused=True, materialize_grads=True)
        results.append((answer.output, *answer.losses.values(), *gradients))
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)
