"""Attention mass against all pairs written out, and the worth of far text against a model that runs on the cut text."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.model.models import small_model
from varifocal.analysis import attention_mass as module
from varifocal.analysis.attention_mass import AttentionMass, attention_mass
from varifocal.analysis.observation import selected_distances
from varifocal.attention.mechanisms import HeadShape, Mechanism, make_mechanism
from varifocal.equations.branches import TopK
from varifocal.training.context_gain import windowed_losses

LENGTH, WINDOW = 40, 6
TOP_K = TopK(scale=1.0, minimum=2)
DOCUMENTS = torch.tensor([[0] * 25 + [1] * 15])


class Text(NamedTuple):
    """What a layer gives to its mechanism."""

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


def make_text(mechanism: Mechanism[Any]) -> Text:
    torch.manual_seed(1)
    shape = mechanism.shape
    x = torch.randn(1, LENGTH, shape.model_width)
    q = 2 * torch.randn(1, shape.heads, LENGTH, shape.head_width)
    k, v = (torch.randn(1, shape.kv_heads, LENGTH, shape.head_width) for _ in range(2))
    return Text(x, q, k, v)


def mass_of(mechanism: Mechanism[Any], text: Text, documents: Tensor = DOCUMENTS) -> AttentionMass:
    return attention_mass(text.q, text.k, mechanism(*text, documents=documents), window=WINDOW, top_k=TOP_K)


def small_mechanism(name: str, **options: Any) -> Mechanism[Any]:
    torch.manual_seed(0)
    return make_mechanism(name, HeadShape(model_width=16, heads=4, kv_heads=2, head_width=8), **options)


def measure(name: str = "dense", **options: Any) -> tuple[AttentionMass, Tensor]:
    """The mass, and the softmax [H, T, S] of all pairs of plain dot products."""
    mechanism = small_mechanism(name, **options)
    call = make_text(mechanism)
    found = mass_of(mechanism, call)
    index = torch.arange(LENGTH)
    seen = (index[:, None] >= index) & (DOCUMENTS[0][:, None] == DOCUMENTS[0])
    scores = call.q[0] @ call.k[0].repeat_interleave(2, dim=0).mT / math.sqrt(8)
    return found, scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)


def test_mass_in_the_window_is_that_of_the_last_keys() -> None:
    found, pairs = measure()
    for query in (0, 3, 24, 27, 39):
        first = max(query - WINDOW + 1, 0)
        assert found.window[:, query] == pytest.approx(pairs[:, query, first : query + 1].sum(dim=1), abs=1e-6)


def test_mass_of_top_k_is_that_of_the_best_keys_by_the_place_in_the_document() -> None:
    found, pairs = measure()
    # Query 39 is the 15th token of its document: 4 keys.
    assert found.top_k[:, 39] == pytest.approx(pairs[:, 39].topk(4, dim=1).values.sum(dim=1), abs=1e-6)
    assert found.top_k[:, 24] == pytest.approx(pairs[:, 24].topk(5, dim=1).values.sum(dim=1), abs=1e-6)


def test_mass_of_either_counts_no_key_twice() -> None:
    found, pairs = measure()
    for head in range(4):
        read = set(pairs[head, 39].topk(4).indices.tolist()) | set(range(39 - WINDOW + 1, 40))
        assert float(found.window_or_top_k[head, 39]) == pytest.approx(
            float(pairs[head, 39, list(read)].sum()), abs=1e-6
        )


def test_first_token_is_that_of_the_document() -> None:
    found, pairs = measure()
    assert found.first[:, 30] == pytest.approx(pairs[:, 30, 25])


def test_shares_by_distance_add_up_to_the_whole() -> None:
    found, pairs = measure()
    assert found.shares.sum(dim=2) == pytest.approx(torch.ones(4, LENGTH), abs=1e-5)
    assert found.shares[:, 20, 2] == pytest.approx(pairs[:, 20, 17:19].sum(dim=1), abs=1e-6)


def test_mean_distance_is_weighted_by_mass() -> None:
    found, pairs = measure()
    distance = 20 - torch.arange(LENGTH).float()
    assert found.distance[:, 20] == pytest.approx(pairs[:, 20] @ distance, abs=1e-4)


def test_few_queries_at_a_time_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = measure("dynamic_sparse", rank=4)
    monkeypatch.setattr(module, "PAIRS", 4 * LENGTH * 7)
    parts, _ = measure("dynamic_sparse", rank=4)
    for name in ("window", "top_k", "window_or_top_k", "first", "distance", "selected", "shares"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), abs=1e-6)


def test_selected_mass_of_the_exact_top_k_is_that_of_the_best_keys() -> None:
    found, pairs = measure("context_adaptive", window_min=4, window_max=8, edge=2, k_scale=1.0, k_min=2)
    assert found.selected is not None
    own = pairs[:, 39].topk(4, dim=1)
    missed = torch.where((own.indices == 39).any(dim=1), 0.0, pairs[:, 39, 39])
    assert found.selected[:, 39] == pytest.approx(own.values.sum(dim=1) + missed, abs=1e-6)


def test_selected_blocks_are_read_whole_and_with_the_query_s_own() -> None:
    mechanism = small_mechanism("context_adaptive", window_min=4, window_max=8, edge=2, select="blocks", block=4)
    call = make_text(mechanism)
    selected = mechanism(*call, documents=DOCUMENTS).records["selected"]
    found = mass_of(mechanism, call)
    _, pairs = measure()
    assert found.selected is not None
    for head in range(4):
        read = [key + step for key in selected[0, head, 22].tolist() if key >= 0 for step in range(4)]
        expected = pairs[head, 22, [*read, 20, 21, 22]].sum()
        assert float(found.selected[head, 22]) == pytest.approx(float(expected), abs=1e-6)


def test_pair_gates_count_as_part_of_the_score() -> None:
    gated, plain = measure("sparse_geometric", hidden=4)
    assert gated.shares.sum(dim=2) == pytest.approx(torch.ones(4, LENGTH), abs=1e-5)
    # Gates near 1/2 flatten the scores: less mass on the best keys.
    best = torch.stack([plain[:, query].topk(4, dim=1).values.sum(dim=1) for query in (38, 39)])
    assert (best > gated.top_k[:, 38:40].T).all()


def test_padding_has_no_mass() -> None:
    mechanism = small_mechanism("dense")
    found = mass_of(mechanism, make_text(mechanism), torch.tensor([[0] * 30 + [-1] * 10]))
    assert found.window[:, 30:].isnan().all()
    assert found.window[:, :30].isfinite().all()


def test_distances_are_from_the_query_to_what_was_selected() -> None:
    selected = torch.tensor([[[0, -1], [0, 1], [0, 2]]])
    mean, counts = selected_distances(selected)
    assert mean.tolist() == [[0.0, 0.5, 1.0]]
    assert counts.tolist() == [[3.0, 1.0, 1.0]]


@pytest.mark.parametrize("length", [40, 37])
def test_windowed_loss_is_that_of_the_text_cut_short(length: int) -> None:
    model = small_model("dense", max_position_embeddings=64)
    ids = torch.randint(0, model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(0))
    found = windowed_losses(model, ids, torch.zeros(length, dtype=torch.int64), window=8)
    for query in (3, 11, 30):
        begin = 0 if query < 8 else (query // 4 - 1) * 4
        with torch.no_grad():
            logits = model(input_ids=ids[None, begin : query + 1]).logits[0, -1]
        expected = torch.nn.functional.cross_entropy(logits.float(), ids[query + 1])
        assert float(found[query]) == pytest.approx(float(expected), abs=1e-4)
    assert found[-1].isnan()
    assert found[:-1].isfinite().all()


def test_windowed_loss_does_not_cross_documents() -> None:
    model = small_model("dense", max_position_embeddings=64)
    ids = torch.randint(0, model.config.vocab_size, (24,), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([0] * 10 + [1] * 14)
    found = windowed_losses(model, ids, documents, window=8)
    other = ids.clone()
    other[:10] = (other[:10] + 1) % model.config.vocab_size
    assert found[9].isnan()
    assert windowed_losses(model, other, documents, window=8)[10:-1] == pytest.approx(found[10:-1], abs=1e-5)
