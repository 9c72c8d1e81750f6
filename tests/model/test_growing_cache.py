"""A growing cache layer: the tokens of transformers' own, without its copies, and means that are never stale."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from varifocal.model.growing_cache import GrowingLayer

from tests.model.models import VARIANTS, VOCABULARY, small_model
from varifocal.attention import segment_summaries
from varifocal.attention.mechanisms.base import RankedBlocks
from varifocal.kernels.native.combiner import summarize_full

BLOCKS = ["context_adaptive blocks", "dynamic_sparse blocks"]


def tokens(batch: int, length: int, seed: int = 3) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def states(length: int, seed: int = 0, batch: int = 2) -> Tensor:
    return torch.randn(batch, 2, length, 8, generator=torch.Generator().manual_seed(seed))


def test_it_holds_what_transformers_own_layer_holds() -> None:
    ours, theirs = GrowingLayer(), DynamicLayer()
    for number, length in enumerate((5, 1, 1, 90, 1)):
        k, v = states(length, number), states(length, number + 50)
        for one, other in zip(ours.update(k, v), theirs.update(k, v), strict=True):
            assert torch.equal(one, other)
    assert ours.get_seq_length() == theirs.get_seq_length() == 98


def test_single_tokens_are_written_in_place() -> None:
    layer = GrowingLayer()
    layer.update(states(10), states(10))
    before = layer.keys.data_ptr()
    for number in range(20):
        layer.update(states(1, number), states(1, number))
    assert layer.keys.data_ptr() == before


@pytest.mark.parametrize("change", ["reorder", "crop", "repeat", "select"])
def test_changed_rows_and_lengths_are_kept_apart_from_the_old_room(change: str) -> None:
    ours, theirs = GrowingLayer(), DynamicLayer()
    for layer in (ours, theirs):
        layer.update(states(12), states(12, 1))
        if change == "reorder":
            layer.reorder_cache(torch.tensor([1, 1]))
        elif change == "crop":
            layer.crop(-5)
        elif change == "repeat":
            layer.batch_repeat_interleave(2)
        else:
            layer.batch_select_indices(torch.tensor([1]))
        batch = layer.keys.shape[0]
        layer.update(states(3, 7, batch), states(3, 8, batch))
    assert torch.equal(ours.keys, theirs.keys)
    assert torch.equal(ours.values, theirs.values)


def test_means_of_single_tokens_are_those_of_the_whole() -> None:
    keys = states(23)
    layer, whole = GrowingLayer(), GrowingLayer()
    for end in (9, 10, 11, 17, 23):
        begin = layer.pooled_length
        means = layer.means(RankedBlocks(keys[:, :, :end], 4), new=end - begin, documents=None)
    expected = whole.means(RankedBlocks(keys, 4), new=23, documents=None)
    assert torch.equal(means[:, :, :5], expected[:, :, :5])  # the sixth block is not complete


def test_means_are_made_anew_after_a_crop() -> None:
    layer, keys = GrowingLayer(), states(16)
    layer.update(keys, keys)
    layer.means(RankedBlocks(keys, 4), new=16, documents=None)
    layer.crop(-3)
    other = torch.cat((keys[:, :, :13], states(3, 9)), dim=2)
    layer.update(other[:, :, 13:], other[:, :, 13:])
    means = layer.means(RankedBlocks(other, 4), new=3, documents=None)
    torch.testing.assert_close(means[:, :, 3], other[:, :, 12:].mean(dim=2))


@pytest.mark.parametrize("variant", BLOCKS)
def test_model_decodes_with_kept_means(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = small_model(variant), tokens(2, 24)
    asked: list[int] = []
    original = GrowingLayer.means

    def counted(self: GrowingLayer, ranked: RankedBlocks, *, new: int, documents: Tensor | None) -> Tensor:
        asked.append(new)
        return original(self, ranked, new=new, documents=documents)

    monkeypatch.setattr(GrowingLayer, "means", counted)
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        cache = DynamicCache()
        parts = [
            model(input_ids=part, past_key_values=cache).logits for part in torch.split(ids, [10, *[1] * 14], dim=1)
        ]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)
    assert asked[-2:] == [1, 1]
    assert all(isinstance(layer, GrowingLayer) for layer in cache.layers)


def test_combiner_decodes_with_kept_summaries_and_reads_each_segment_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = small_model("combiner"), tokens(2, 24)
    read: list[int] = []
    original = summarize_full

    def counted(queries: Tensor, k: Tensor, v: Tensor, *, length: int) -> tuple[Tensor, Tensor]:
        read.append(k.shape[2])
        return original(queries, k, v, length=length)

    monkeypatch.setattr(segment_summaries, "summarize_full", counted)
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        cache = DynamicCache()
        parts = [
            model(input_ids=part, past_key_values=cache).logits for part in torch.split(ids, [2, 9, *[1] * 13], dim=1)
        ]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)
    # Segments of 4 in 2 layers: two are complete after 11 tokens, then one at 12, 16, 20 and 24.
    assert read == [8, 8, *[4] * 8]


@pytest.mark.parametrize("variant", ["dense", "combiner", *BLOCKS])
def test_text_goes_on_after_a_crop_as_if_the_tokens_had_never_been(variant: str) -> None:
    model, ids = small_model(variant), tokens(1, 22)
    other = torch.cat((ids[:, :15], tokens(1, 7, seed=8)), dim=1)
    with torch.no_grad():
        cache = DynamicCache()
        model(input_ids=ids, past_key_values=cache)
        cache.crop(-7)
        found = model(input_ids=other[:, 15:], past_key_values=cache).logits
        wanted = model(input_ids=other, use_cache=False).logits[:, 15:]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_flow_through_a_cache(variant: str) -> None:
    model, ids = small_model(variant), tokens(1, 12)
    model.train()
    cache = DynamicCache()
    first = model(input_ids=ids[:, :7], past_key_values=cache, use_cache=True).logits
    second = model(input_ids=ids[:, 7:], past_key_values=cache, use_cache=True).logits
    torch.cat((first, second), dim=1).square().sum().backward()  # type: ignore[no-untyped-call]
    found = model.model.embed_tokens.weight.grad
    model.zero_grad()
    model(input_ids=ids, use_cache=False).logits.square().sum().backward()
    torch.testing.assert_close(found, model.model.embed_tokens.weight.grad, rtol=1e-3, atol=1e-3)
