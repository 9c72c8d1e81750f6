"""What holds for every mixture of branches, on random texts, documents and sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from varifocal import (
    Branch,
    Causal,
    Dot,
    Indexer,
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
