"""The loss without logits: equal to cross entropy over all of them, in value and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.model.models import VOCABULARY, random_tokens, small_model
from varifocal.model import loss as loss_file
from varifocal.model.head import token_losses
from varifocal.model.loss import IGNORED, linear_cross_entropy, next_token_labels


def inputs(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 12, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(37, 12, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, 37, (rows,), generator=generator)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 30])
def test_loss_and_gradients_are_those_of_all_logits(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_file, "ROWS_AT_A_TIME", 8)
    hidden, weight, labels = inputs(rows)
    found = linear_cross_entropy(hidden, weight, labels)
    gradients = torch.autograd.grad(found * 0.3, (hidden, weight))
    expected = F.cross_entropy(hidden @ weight.mT, labels, reduction="sum")
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected * 0.3, (hidden, weight)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_ignored_labels_count_for_nothing() -> None:
    hidden, weight, labels = inputs(20)
    labels[3:9] = IGNORED
    found = linear_cross_entropy(hidden, weight, labels)
    gradients = torch.autograd.grad(found, (hidden, weight))
    expected = F.cross_entropy(hidden @ weight.mT, labels, reduction="sum")
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, (hidden, weight)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_nothing_to_predict_is_loss_and_gradient_zero() -> None:
    hidden, weight, labels = inputs(4)
    found = linear_cross_entropy(hidden, weight, torch.full_like(labels, IGNORED))
    gradients = torch.autograd.grad(found, (hidden, weight))
    assert found == 0
    assert not any(gradient.any() for gradient in gradients)


def test_logits_of_any_size_give_a_finite_loss() -> None:
    hidden, weight, labels = inputs(8)
    found = linear_cross_entropy(hidden * 1e4, weight, labels)
    torch.testing.assert_close(found, F.cross_entropy(hidden @ weight.mT * 1e4, labels, reduction="sum"))


@pytest.mark.parametrize("sure", [1.0, 12.0], ids=["random", "nearly certain"])
def test_products_under_autocast_are_narrow_and_as_accurate_as_torchs(
    sure: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_file, "ROWS_AT_A_TIME", 8)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(37, 32, generator=generator)
    labels = torch.randint(0, 37, (30,), generator=generator)
    hidden = torch.randn(30, 32, generator=generator) + (sure - 1) / 32**0.5 * weight[labels]
    leaves = hidden.requires_grad_(), weight.requires_grad_()

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = F.linear(hidden, weight)
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels, reduction="sum")

    def results(loss: Tensor) -> tuple[Tensor, ...]:
        return (loss.detach(), *torch.autograd.grad(loss, leaves))

    truth = results(plain(hidden.double(), weight.double()))
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = results(linear_cross_entropy(hidden, weight, labels)), results(plain(hidden, weight))
    for found, rounded, exact in zip(ours, theirs, truth, strict=True):
        assert found.dtype == torch.float32
        assert (found - exact).abs().max() <= 2 * (rounded - exact).abs().max()
    wide = results(linear_cross_entropy(hidden, weight, labels))
    assert not torch.equal(ours[1], wide[1])


def test_float16_leaves_the_sum_of_exponentials_wide() -> None:
    """With as many equal logits as float16 has numbers below its largest, twice over."""
    hidden, weight = torch.zeros(2, 4, requires_grad=True), torch.zeros(140_000, 4, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        loss = linear_cross_entropy(hidden, weight, torch.tensor([0, 1]))
    loss.backward()
    assert hidden.grad is not None
    assert bool(hidden.grad.isfinite().all())
    torch.testing.assert_close(loss.detach(), torch.tensor(2 * 140_000.0).log() * 2 - 2 * torch.tensor(2.0).log())


def test_frozen_weight_gets_no_gradient() -> None:
    hidden, weight, labels = inputs(8)
    (gradient,) = torch.autograd.grad(linear_cross_entropy(hidden, weight.detach(), labels), (hidden,))
    (expected,) = torch.autograd.grad(F.cross_entropy(hidden @ weight.mT, labels, reduction="sum"), (hidden,))
    torch.testing.assert_close(gradient, expected)


def test_second_backward_is_refused() -> None:
    hidden, weight, labels = inputs(8)
    found = linear_cross_entropy(hidden, weight, labels)
    found.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="the loss was differentiated already"):
        found.backward()


def test_label_outside_the_vocabulary_is_explained() -> None:
    hidden, weight, labels = inputs(8)
    labels[2] = 37
    with pytest.raises(ValueError, match=r"-100 or between 0 and 36, got \d+ to 37"):
        linear_cross_entropy(hidden, weight, labels)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32])
def test_labels_of_any_integer_type_give_the_loss_of_int64(dtype: torch.dtype) -> None:
    model, tokens = small_model("head_gated"), random_tokens(2, 12)
    with torch.no_grad():
        expected = model(tokens, labels=tokens).loss
        assert model(tokens, labels=tokens.to(dtype)).loss == expected
        hidden = model.model(tokens).last_hidden_state.flatten(0, 1)
        labels = tokens.flatten()
        summed = linear_cross_entropy(hidden, model.lm_head.weight, labels)
        assert torch.equal(linear_cross_entropy(hidden, model.lm_head.weight, labels.to(dtype)), summed)
        each = token_losses(model.lm_head, hidden, labels)
        assert torch.equal(token_losses(model.lm_head, hidden, labels.to(dtype)), each)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_labels_that_are_not_integers_are_refused_in_one_sentence(dtype: torch.dtype) -> None:
    hidden, weight, labels = inputs(8)
    sentence = f"^labels must be integers, got {dtype}; convert them with labels.long\\(\\)$"
    with pytest.raises(ValueError, match=sentence):
        linear_cross_entropy(hidden, weight, labels.to(dtype))
    with pytest.raises(ValueError, match=sentence):
        token_losses(torch.nn.Linear(12, 37), hidden, labels.to(dtype))
    tokens = random_tokens(1, 4)
    with pytest.raises(ValueError, match=sentence):
        small_model()(tokens, labels=tokens.to(dtype))


@pytest.mark.parametrize("wrong", [-1, VOCABULARY])
def test_label_of_no_token_is_refused_wherever_labels_are_read(wrong: int) -> None:
    model, tokens = small_model(), random_tokens(1, 4)
    labels = tokens.clone()
    labels[0, 2] = wrong
    with pytest.raises(ValueError, match=f"between 0 and {VOCABULARY - 1}, got"):
        model(tokens, labels=labels)
    with pytest.raises(ValueError, match=f"^labels must be between 0 and {VOCABULARY - 1}, got"):
        token_losses(model.lm_head, torch.zeros(4, 24), labels[0])


@pytest.mark.parametrize("shape", [(2, 4), (1, 3), (4,)])
def test_labels_of_another_shape_are_refused_in_one_sentence(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^labels must be \[B, T\] = \(1, 4\), got shape"):
        small_model()(random_tokens(1, 4), labels=torch.zeros(shape, dtype=torch.int64))


def test_labels_are_those_of_the_following_tokens() -> None:
    labels = torch.tensor([[1, 2, 3, 4]])
    assert next_token_labels(labels, None).tolist() == [[2, 3, 4, IGNORED]]


def test_no_document_predicts_the_first_token_of_the_next() -> None:
    labels, documents = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[0, 0, 1, 1, -1]])
    assert next_token_labels(labels, documents).tolist() == [[2, IGNORED, 4, IGNORED, IGNORED]]


def test_padding_is_not_predicted() -> None:
    labels, documents = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[-1, -1, 0, 0, 0]])
    assert next_token_labels(labels, documents).tolist() == [[IGNORED, IGNORED, 4, 5, IGNORED]]


def test_loss_of_packed_documents_is_the_loss_of_each_alone() -> None:
    model, first, second = small_model("head_gated"), random_tokens(1, 9), random_tokens(1, 15, seed=2)
    packed = torch.cat((first, second), dim=1)
    documents = torch.tensor([[0] * 9 + [1] * 15])
    positions = torch.cat((torch.arange(9), torch.arange(15)))[None]
    with torch.no_grad():
        alone = (model(first, labels=first).loss * 8 + model(second, labels=second).loss * 14) / 22
        torch.testing.assert_close(model(packed, labels=packed, documents=documents).loss, alone)
        torch.testing.assert_close(model(packed, labels=packed, position_ids=positions).loss, alone)


def test_loss_of_a_padded_text_is_the_loss_of_the_text() -> None:
    model, tokens = small_model("context_adaptive"), random_tokens(1, 12)
    padded = torch.cat((random_tokens(1, 4, seed=3), tokens), dim=1)
    mask = torch.ones_like(padded)
    mask[:, :4] = 0
    with torch.no_grad():
        found = model(padded, labels=padded, attention_mask=mask).loss
        torch.testing.assert_close(found, model(tokens, labels=tokens).loss)
