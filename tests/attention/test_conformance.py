"""The kit passes what is right, and catches each mistake in the row that is made for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.attention import broken_attentions as broken
from varifocal import Causal, TopK, Window, attend, conformance
from varifocal.attention.conformance.subject import CallableSubject

MECHANISMS = ("context_adaptive", "sparse_geometric", "dynamic_sparse blocks", "combiner")
"""Those with the most parts of their own."""


@pytest.mark.parametrize("name", conformance.every_variant())
def test_mechanism_keeps_every_promise_in_float64(name: str) -> None:
    conformance.assert_conforms(name)


# The coarsest type for all of them. float16 has another range, and is held for those with the most parts alone.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in conformance.every_variant()),
        *((name, dtype) for name in MECHANISMS for dtype in (torch.float32, torch.float16)),
    ],
    ids=str,
)
def test_mechanism_keeps_every_promise_in_narrower_types(name: str, dtype: torch.dtype) -> None:
    conformance.assert_conforms(name, dtype=dtype)


@pytest.mark.parametrize(("heads", "kv_heads", "head_width"), [(1, 1, 1), (6, 2, 5), (3, 3, 16), (4, 1, 7)])
@pytest.mark.parametrize("name", MECHANISMS)
def test_mechanism_keeps_every_promise_for_any_layout_of_heads(
    name: str, heads: int, kv_heads: int, head_width: int
) -> None:
    conformance.assert_conforms(name, heads=heads, kv_heads=kv_heads, head_width=head_width)


CAUGHT: list[tuple[Callable[..., Tensor], str, int | None]] = [
    (broken.window_off_by_one, "window", 5),
    (broken.k_from_length, "prefix", None),
    (broken.k_from_length, "tokens", None),
    (broken.mask_sliced_from_a_global_triangle, "chunks", None),
    (broken.mask_sliced_from_a_global_triangle, "tokens", None),
    (broken.KeysRotatedTwice(), "tokens", None),
    (broken.not_causal, "future", None),
    (broken.members_of_the_whole_text, "future", None),
    (broken.members_of_the_whole_text, "prefix", None),
    (broken.finite_mask_sentinel, "empty", None),
    (broken.ignores_documents, "packed", None),
    (broken.ignores_documents, "padded", None),
    (broken.key_heads_in_the_wrong_order, "groups", None),
    (broken.first_row_for_all, "batch", None),
    (broken.gradient_a_little_off, "gradients", None),
]


@pytest.mark.parametrize(
    ("attention", "row", "window"),
    CAUGHT,
    ids=[f"{getattr(a, '__name__', type(a).__name__)}-{row}" for a, row, _ in CAUGHT],
)
def test_mistake_is_caught_by_its_row(attention: Callable[..., Tensor], row: str, window: int | None) -> None:
    assert conformance.check(attention, window=window)[row].verdict == "broken"


# What each mistake leaves intact: the kit points at the mistake, not at everything.
@pytest.mark.parametrize(
    ("attention", "rows", "window"),
    [
        (broken.window_off_by_one, {"window"}, 5),
        (broken.mask_sliced_from_a_global_triangle, {"chunks", "tokens"}, None),
        (broken.KeysRotatedTwice(), {"chunks", "tokens"}, None),
        (broken.ignores_documents, {"packed", "padded", "empty"}, None),
        (broken.key_heads_in_the_wrong_order, {"groups"}, None),
        (broken.gradient_a_little_off, {"gradients"}, None),
    ],
)
def test_mistake_breaks_no_other_row(attention: Callable[..., Tensor], rows: set[str], window: int | None) -> None:
    result = conformance.check(attention, window=window)
    assert {finding.row.name for finding in result.broken} == rows


def test_attention_with_a_cache_of_its_own_conforms_when_it_is_right() -> None:
    conformance.assert_conforms(broken.KeysRotatedOnce())


def test_torch_attention_conforms_when_aligned_to_the_last_key() -> None:
    def aligned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    conformance.assert_conforms(aligned)


def test_declared_window_of_the_right_size_conforms() -> None:
    conformance.assert_conforms(lambda q, k, v: attend(q, k, v, branches=Window(5)).output, window=5)


def test_tie_broken_by_the_higher_index_is_caught() -> None:
    class HigherIndexWins(CallableSubject):
        def selected(self, tokens: object) -> Tensor:
            return torch.tensor([1]).expand(2, 4, 8, 1)

    def top_k(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, branches=TopK()).output

    subject = HigherIndexWins(attention=top_k, name="higher index wins", selects=1)
    assert conformance.check(subject)["ties"].verdict == "broken"


def test_tie_broken_by_what_comes_later_is_caught() -> None:
    def last_of_equals(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nudge = torch.arange(k.shape[2], dtype=k.dtype)[:, None] * 1e-9 * (k.shape[2] % 2)
        return attend(q, k + nudge, v, branches=TopK()).output

    subject = CallableSubject(attention=last_of_equals, name="last of equals", selects=1)
    assert conformance.check(subject)["ties"].verdict == "broken"


def test_rows_that_need_documents_are_not_offered_by_an_attention_without_them() -> None:
    result = conformance.check(lambda q, k, v: attend(q, k, v, branches=Causal()).output)
    verdicts = {finding.row.name: finding.verdict for finding in result.findings}
    assert [row for row, verdict in verdicts.items() if verdict == "not offered"] == [
        "positions", "packed", "padded", "empty", "ties", "window",
    ]  # fmt: skip


def test_attention_that_raises_breaks_the_promise_with_its_message() -> None:
    def refuses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise RuntimeError("not today")

    assert "not today" in conformance.check(refuses)["prefix"].detail


def test_assertion_names_every_broken_row() -> None:
    with pytest.raises(AssertionError, match=r"chunk by chunk: the output differs"):
        conformance.assert_conforms(broken.mask_sliced_from_a_global_triangle)


def test_unknown_row_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown conformance row 'fixture'; known are future, prefix"):
        conformance.check("dense", rows=["fixture"])


def test_unknown_mechanism_is_named_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown mechanism 'head_gate' \(did you mean 'head_gated'\?\)"):
        conformance.check("head_gate")
