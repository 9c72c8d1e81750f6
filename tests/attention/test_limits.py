"""Limits that pin the mathematics: where one attention must become another, nothing, or stay what it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.attention.mechanisms import OPTIONS, Tokens, small_mechanism, tokens
from tests.cases import CASES, Case, Inputs
from varifocal import (
    Branch,
    Causal,
    Dot,
    HeadScale,
    Indexer,
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
        ("local", {"window": 12, "global_tokens": 0}),
        ("local", {"window": 1, "global_tokens": 12}),
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
        chosen = [part for part in attended.selected if part is not None]
        results.append((attended.output, attended.logsumexp, *chosen, *gradients))
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


@dataclass(frozen=True, eq=False)
class Scene:
    """A random call that can be cut to some rows, queries and keys, its branches with it."""

    q: Tensor
    k: Tensor
    v: Tensor
    weights: Tensor
    width: Tensor
    index_queries: Tensor
    index_keys: Tensor
    documents: Tensor
    kinds: tuple[str, ...]
    size: int

    def branches(self, rows: Any, queries: Any, keys: Any) -> tuple[Branch, ...]:
        return tuple(self.branch(kind, rows, queries, keys) for kind in self.kinds)

    def branch(self, kind: str, rows: Any, queries: Any, keys: Any) -> Branch:
        size = self.size
        known: dict[str, Callable[[], Branch]] = {
            "causal": Causal,
            "window": lambda: Window(size),
            "window_prefix": lambda: Window(size) | Prefix(2),
            "soft_window": lambda: SoftWindow(self.width[rows][:, :, queries], edge=1.5, limit=2 * size + 3),
            "strided": lambda: Strided(size),
            "random_blocks": lambda: Window(1) | RandomBlocks(2, block=size, seed=7),
            "segments": lambda: Segments(size, queries=self.q[rows][:, :, keys]),
            "top_k": lambda: TopK(minimum=size),
            "top_k_blocks": lambda: TopK(scale=2.0, select="blocks", block=size),
            "indexer": lambda: TopK(
                indexer=Indexer(self.index_queries[rows][:, :, queries], self.index_keys[rows][:, :, keys])
            ),
        }
        return known[kind]()

    def attend(self, rows: Any = slice(None), queries: Any = slice(None), keys: Any = slice(None)) -> Tensor:
        """The output of some rows for some queries, which must be the last of the given keys."""
        return attend(
            self.q[rows][:, :, queries],
            self.k[rows][:, :, keys],
            self.v[rows][:, :, keys],
            branches=self.branches(rows, queries, keys),
            weights=self.weights[rows][:, :, queries],
            documents=self.documents[rows][:, keys],
        ).output


same_everywhere = settings(
    deadline=None, derandomize=True, max_examples=100, suppress_health_check=[HealthCheck.too_slow], database=None
)
"""The same examples in every run, however busy the machine: time is no test, and a test that fails must fail again."""

KINDS = (
    "causal", "window", "window_prefix", "soft_window", "strided", "random_blocks", "segments", "top_k", "top_k_blocks",
    "indexer",
)  # fmt: skip


@st.composite
def document_rows(draw: st.DrawFn, length: int) -> list[int]:
    """Ids of one row: documents and padding in runs of any length."""
    row: list[int] = []
    number = 0
    while len(row) < length:
        run = draw(st.integers(1, length - len(row)))
        row += [draw(st.sampled_from([-1, number, number, number]))] * run
        number += 1
    return row


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    batch, groups, repeats = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    length, width, size = draw(st.integers(1, 14)), draw(st.integers(1, 6)), draw(st.integers(1, 16))
    chosen = tuple(draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3)))
    documents = torch.tensor([draw(document_rows(length)) for _ in range(batch)])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    heads = groups * repeats

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    return Scene(
        q=normal(batch, heads, length, width),
        k=normal(batch, groups, length, width),
        v=normal(batch, groups, length, width),
        weights=normal(batch, heads, length, len(chosen)).softmax(dim=-1),
        width=normal(batch, heads, length).sigmoid() * (2 * size + 1.5) + 1.5,
        index_queries=normal(batch, heads, length, 2),
        index_keys=normal(batch, groups, length, 2),
        documents=documents,
        kinds=chosen,
        size=size,
    )


@same_everywhere
@given(scenes())
def test_packed_documents_read_as_if_alone(scene: Scene) -> None:
    together = scene.attend()
    for row, ids in enumerate(scene.documents.tolist()):
        for number in sorted({number for number in ids if number >= 0}):
            span = slice(ids.index(number), len(ids) - ids[::-1].index(number))
            alone = scene.attend(slice(row, row + 1), span, span)
            torch.testing.assert_close(together[row : row + 1, :, span], alone, rtol=ROUNDING, atol=ROUNDING)


@same_everywhere
@given(scenes(), st.data())
def test_changing_the_future_changes_nothing_exactly(scene: Scene, data: st.DataObject) -> None:
    now = data.draw(st.integers(1, scene.q.shape[2]))
    changed = Scene(
        **vars(scene)
        | {name: getattr(scene, name).clone() for name in ("q", "k", "v", "weights", "index_queries", "index_keys")}
    )
    for name in ("q", "k", "v", "index_queries", "index_keys"):
        getattr(changed, name)[:, :, now:] *= -3.0
    assert torch.equal(changed.attend()[:, :, :now], scene.attend()[:, :, :now])


@same_everywhere
@given(scenes(), st.data())
def test_cutting_off_the_future_changes_nothing(scene: Scene, data: st.DataObject) -> None:
    now = slice(0, data.draw(st.integers(1, scene.q.shape[2])))
    prefix = scene.attend(queries=now, keys=now)
    torch.testing.assert_close(prefix, scene.attend()[:, :, now], rtol=ROUNDING, atol=ROUNDING)


@same_everywhere
@given(scenes(), st.data())
def test_the_last_queries_alone_read_as_they_do_among_all(scene: Scene, data: st.DataObject) -> None:
    last = slice(data.draw(st.integers(0, scene.q.shape[2] - 1)), None)
    torch.testing.assert_close(scene.attend(queries=last), scene.attend()[:, :, last], rtol=ROUNDING, atol=ROUNDING)


@same_everywhere
@given(scenes(), st.data())
def test_queries_at_given_positions_read_as_they_do_in_place(scene: Scene, data: st.DataObject) -> None:
    place = st.integers(0, scene.q.shape[2] - 1)
    positions = torch.tensor(data.draw(st.lists(place, min_size=1, max_size=16)))
    everything = slice(None)
    output = attend(
        scene.q[:, :, positions],
        scene.k,
        scene.v,
        branches=scene.branches(everything, positions, everything),
        weights=scene.weights[:, :, positions],
        documents=scene.documents,
        positions=positions,
    ).output
    torch.testing.assert_close(output, scene.attend()[:, :, positions], rtol=ROUNDING, atol=ROUNDING)


@same_everywhere
@given(scenes(), st.data())
def test_order_of_the_batch_does_not_matter(scene: Scene, data: st.DataObject) -> None:
    order = torch.tensor(data.draw(st.permutations(range(scene.q.shape[0]))))
    assert torch.equal(scene.attend(order), scene.attend()[order])


@same_everywhere
@given(scenes())
def test_grouped_heads_read_as_repeated_ones(scene: Scene) -> None:
    repeats = scene.q.shape[1] // scene.k.shape[1]
    parts = {name: getattr(scene, name).repeat_interleave(repeats, dim=1) for name in ("k", "v", "index_keys")}
    repeated = Scene(**vars(scene) | parts)
    torch.testing.assert_close(repeated.attend(), scene.attend(), rtol=ROUNDING, atol=ROUNDING)


@same_everywhere
@given(scenes())
def test_softmax_rows_sum_to_one(scene: Scene) -> None:
    # Values of 1 show the sum of a row: each branch reads at least the query's own key, unless it is padding.
    ones = Scene(**vars(scene) | {"v": torch.ones_like(scene.v)})
    wanted = scene.weights.sum(dim=-1, keepdim=True) * (scene.documents >= 0)[:, None, :, None]
    torch.testing.assert_close(ones.attend(), wanted.expand_as(scene.q), rtol=ROUNDING, atol=ROUNDING)


@same_everywhere
@given(scenes(), st.integers(1, 16), st.integers(0, 4))
def test_a_wider_window_never_reads_less(scene: Scene, size: int, more: int) -> None:
    narrow, wide, all_keys = attend(
        scene.q,
        scene.k,
        scene.v,
        branches=(Window(size), Window(size + more), Causal()),
        weights=scene.weights.new_ones(*scene.weights.shape[:3], 3),
        documents=scene.documents,
    ).logsumexp.unbind(dim=-1)
    # Sums of positive numbers only grow with more of them; only their rounding can differ.
    assert bool((narrow <= wide + ROUNDING).all())
    assert bool((wide <= all_keys + ROUNDING).all())


@same_everywhere
@given(scenes(), st.floats(0.0, 5.0))
def test_a_wider_soft_window_never_reads_less(scene: Scene, more: float) -> None:
    limit = 40
    narrow, wide = (
        attend(
            scene.q,
            scene.k,
            scene.v,
            branches=SoftWindow(width, edge=1.5, limit=limit),
            documents=scene.documents,
        ).logsumexp
        for width in (scene.width, scene.width + more)
    )
    assert bool((narrow <= wide + ROUNDING).all())


@same_everywhere
@given(scenes(), st.integers(1, 16))
def test_window_reads_exactly_as_many_keys_as_it_says(scene: Scene, size: int) -> None:
    # With all scores 0 the sum of exponentials counts the keys.
    logsumexp = attend(
        scene.q, scene.k, scene.v, branches=Window(size), score=Dot(0.0), documents=scene.documents
    ).logsumexp[:, 0, :, 0]
    for counts, ids in zip(logsumexp.exp().tolist(), scene.documents.tolist(), strict=True):
        for place, count in enumerate(counts):
            seen = ids[: place + 1].count(ids[place]) if ids[place] >= 0 else 0
            assert count == pytest.approx(min(size, seen))
