"""The reference against brute force, against finite differences, and in every dtype."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from tests.brute_force import Answer, brute_force, scramble
from tests.cases import CASES, CASES_BY_NAME, Case
from varifocal import Causal, RandomBlocks, TopK, Window, attend
from varifocal.equations import branches
from varifocal.equations.reference import NOTHING, best, best_by_threshold

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)

ROUNDING = 1e-12
"""Sums of at most 150 products in float64, each off by at most some 1e-15, added in another order."""


@functools.cache
def expected(name: str) -> Answer:
    return brute_force(CASES_BY_NAME[name].make(torch.float64))


@every_case
def test_output_is_what_the_equation_says(case: Case) -> None:
    inputs = case.make(torch.float64)
    wanted = torch.tensor(expected(case.name).output, dtype=torch.float64).reshape(inputs.q.shape)
    torch.testing.assert_close(inputs.attend("reference").output, wanted, rtol=ROUNDING, atol=ROUNDING)


@every_case
def test_logsumexp_is_what_the_equation_says(case: Case) -> None:
    inputs = case.make(torch.float64)
    shape = (*inputs.q.shape[:3], len(inputs.branches))
    wanted = torch.tensor(expected(case.name).logsumexp, dtype=torch.float64).reshape(shape)
    torch.testing.assert_close(inputs.attend("reference").logsumexp, wanted, rtol=ROUNDING, atol=ROUNDING)


@every_case
def test_selected_keys_are_the_best_in_ascending_order(case: Case) -> None:
    inputs = case.make(torch.float64)
    selected = inputs.attend("reference").selected
    assert len(selected) == len(inputs.branches)
    for number, found in enumerate(selected):
        rows = [query[number] for row in expected(case.name).selected for head in row for query in head]
        if found is None:
            assert all(row is None for row in rows)
            continue
        assert found.dtype == torch.int32
        assert found.shape[:3] == inputs.q.shape[:3]
        assert [[key for key in row if key >= 0] for row in found.flatten(0, 2).tolist()] == rows


@pytest.mark.parametrize("name", ["top_k", "top_k_blocks", "packed_top_k", "cached_top_k_indexer"])
def test_selected_is_no_wider_than_the_largest_k_and_filled_with_minus_one(name: str) -> None:
    found = next(part for part in CASES_BY_NAME[name].make(torch.float64).attend().selected if part is not None)
    lengths = [len(query[0] or []) for row in expected(name).selected for head in row for query in head]
    assert found.shape[-1] == max(lengths)
    assert [row.index(-1) if -1 in row else len(row) for row in found.flatten(0, 2).tolist()] == lengths


@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.ties and case.sizes.T < 100], ids=lambda case: case.name
)
def test_gradients_agree_with_finite_differences_along_random_directions(case: Case) -> None:
    assert gradients_are_right(case, every_entry=False)


@pytest.mark.parametrize("case", [case for case in CASES if case.name.startswith("small_")], ids=lambda case: case.name)
def test_each_entry_of_each_gradient_agrees_with_finite_differences(case: Case) -> None:
    assert gradients_are_right(case, every_entry=True)


def gradients_are_right(case: Case, *, every_entry: bool) -> bool:
    """gradcheck of output and logsumexp for everything that learns; where nothing is read there is no number."""
    inputs = case.make(torch.float64)

    def run(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        attended = inputs.rebuild(dict(zip(inputs.leaves, leaves, strict=True))).attend("reference")
        return attended.output, attended.logsumexp.masked_fill(attended.logsumexp == float("-inf"), 0.0)

    return torch.autograd.gradcheck(run, inputs.leaf_tensors(), fast_mode=not every_entry)


@every_case
def test_every_leaf_gets_a_finite_gradient(case: Case) -> None:
    inputs = case.make(torch.float32)
    output = inputs.attend("reference").output
    gradients = torch.autograd.grad(output, inputs.leaf_tensors(), torch.ones_like(output))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.parametrize("name", ["indexer", "indexer_blocks", "packed_top_k_indexer"])
def test_indexer_gets_no_gradient_from_the_output(name: str) -> None:
    inputs = CASES_BY_NAME[name].make(torch.float64)
    learning = {part: inputs.tensors[part].requires_grad_() for part in ("index_queries", "index_keys")}
    output = inputs.attend("reference").output
    gradients = torch.autograd.grad(output.sum(), tuple(learning.values()), allow_unused=True)
    assert all(gradient is None for gradient in gradients)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_types_lose_only_the_rounding_of_the_output(case: Case, dtype: torch.dtype) -> None:
    inputs = case.make(dtype)
    truth = inputs.converted(torch.float64).attend("reference")
    attended = inputs.attend("reference")
    assert attended.output.dtype == dtype
    # Inside all is float32: sums of up to 150 products of size 10 or so, each off by 6e-8 of it, stay below 1e-5. Then
    # the output is rounded once, by half a unit in the last place.
    half_unit = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(attended.output.double(), truth.output, rtol=half_unit, atol=1e-5)
    assert attended.logsumexp.dtype == torch.float32
    torch.testing.assert_close(attended.logsumexp.double(), truth.logsumexp, rtol=1e-5, atol=1e-5)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_types_lose_only_the_rounding_of_the_gradients(case: Case, dtype: torch.dtype) -> None:
    inputs = case.make(dtype)
    exact = inputs.converted(torch.float64)
    upstream = torch.randn(inputs.q.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    gradients = torch.autograd.grad(inputs.attend("reference").output, inputs.leaf_tensors(), upstream)
    truths = torch.autograd.grad(exact.attend("reference").output, exact.leaf_tensors(), upstream.double())
    for gradient, truth in zip(gradients, truths, strict=True):
        assert gradient.dtype == dtype
        # As above; a key's gradient is summed over 150 queries of up to 4 heads, and then rounded once.
        half_unit = torch.finfo(dtype).eps / 2
        torch.testing.assert_close(gradient.double(), truth, rtol=half_unit, atol=1e-4)


def test_large_float16_scores_do_not_overflow() -> None:
    # 8 * 100 * 100 = 80000 lies beyond float16's 65504.
    q = torch.full((1, 1, 4, 8), 100.0, dtype=torch.float16)
    v = torch.arange(4.0, dtype=torch.float16)[None, None, :, None].expand(1, 1, 4, 8)
    output = attend(q, q, v, branches=Causal()).output
    torch.testing.assert_close(output[0, 0, :, 0], torch.tensor([0.0, 0.5, 1.0, 1.5], dtype=torch.float16))


def test_huge_scores_do_not_overflow_the_softmax() -> None:
    q = torch.full((1, 1, 3, 1), 1e4, dtype=torch.float32)
    attended = attend(q, q, torch.ones_like(q), branches=(Window(1), Causal()), weights=torch.full((1, 1, 3, 2), 0.5))
    torch.testing.assert_close(attended.output, torch.ones_like(q))
    assert bool(attended.logsumexp.isfinite().all())


def test_k_follows_from_the_place_and_from_nothing_else() -> None:
    place = torch.arange(-1, 11)
    assert TopK(scale=1.0, minimum=1).keys_per_query(place).tolist() == [0, 1, 2, 2, 2, 3, 3, 3, 3, 3, 4, 4]
    assert TopK(scale=1.0, minimum=3).keys_per_query(place).tolist() == [0, 1, 2, 3, 3, 3, 3, 3, 3, 3, 4, 4]
    assert TopK(scale=0.0, minimum=2).keys_per_query(place).tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    assert TopK(scale=9.0, minimum=1).keys_per_query(place).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]


def test_the_best_are_the_same_by_order_and_by_threshold() -> None:
    random = torch.Generator().manual_seed(0)
    for _ in range(50):
        scores = torch.randint(0, 4, (2, 3, 7, 11), generator=random).double()  # many of them equal
        scores[torch.rand(scores.shape, generator=random) < 0.3] = NOTHING
        budget = torch.randint(0, 12, (2, 7), generator=random)
        assert torch.equal(best_by_threshold(scores, budget), best(scores, budget)[0])


def test_of_equal_scores_the_lower_index_wins() -> None:
    q, k = torch.ones(1, 1, 6, 2), torch.ones(1, 1, 6, 2)
    selected = attend(q, k, k, branches=TopK(scale=0.0, minimum=2)).selected[0]
    assert selected is not None
    assert selected[0, 0].tolist() == [[0, -1], [0, 1], [0, 1], [0, 1], [0, 1], [0, 1]]


def test_of_equal_blocks_the_lower_index_wins() -> None:
    q, k = torch.ones(1, 1, 6, 2), torch.ones(1, 1, 6, 2)
    selected = attend(q, k, k, branches=TopK(scale=0.0, minimum=1, select="blocks", block=2)).selected[0]
    assert selected is not None
    assert selected[0, 0].tolist() == [[-1], [-1], [0], [0], [0], [0]]


def test_random_blocks_are_spread_over_the_past() -> None:
    # 4000 draws from 16 earlier blocks: each is hit 250 times on average, give or take 15.
    place = torch.tensor([16])
    hits = torch.zeros(16)
    for seed in range(4000):
        hits += RandomBlocks(1, block=1, seed=seed).allows(place, torch.arange(16))
    assert hits.min() > 150
    assert hits.max() < 350


def test_random_blocks_hash_is_the_same_in_tensors_and_in_32_bit_integers() -> None:
    number = torch.tensor([0, 1, 2, 77, 2**20 + 1, 2**31 + 5])
    for seed in (0, 1, 2**31, 2**40 + 3):
        hashed = branches.random_blocks.scramble(number, seed).tolist()
        assert hashed == [scramble(value, seed) for value in number.tolist()]
