"""The steps between matrix products: our kernels against transformers' modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, apply_rotary_pos_emb

from varifocal.kernels.native import library
from varifocal.kernels.steps.cross_entropy import cross_entropy_
from varifocal.kernels.steps.norm import norm
from varifocal.kernels.steps.swiglu import swiglu
from varifocal.model import preset
from varifocal.model.steps import fed_forward, normed, normed_and_rotated

pytestmark = pytest.mark.skipif(library.why_missing() is not None, reason="the native library was not built")

WIDTHS = [8, 20, 32, 128, 130]
"""Shorter than a vector, whole vectors, and with a rest."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def norm_of(width: int, seed: int = 5) -> Qwen3RMSNorm:
    module = Qwen3RMSNorm(width, eps=1e-6)
    module.weight.data = 0.5 + random(width, seed=seed).detach().abs()
    return module


def angles(*shape: int, alike: bool = True, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines; alike: the same in both halves, as rotary embeddings have them."""
    turn = random(*shape, seed=7).detach()
    if alike:
        turn = turn[..., : -(-shape[-1] // 2)].repeat(*(1,) * (len(shape) - 1), 2)[..., : shape[-1]]
    return turn.cos() * factor, turn.sin() * factor


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("width", WIDTHS)
def test_norm_and_its_gradients_are_those_of_transformers(width: int) -> None:
    module, x, upstream = norm_of(width), random(2, 67, width), random(2, 67, width, seed=1)
    results = []
    for output in (normed(module, x), module(x)):
        results.append([output, *torch.autograd.grad(output, (x, module.weight), upstream)])
    assert_same(*results)


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("batch_of_angles", [1, 2])
@pytest.mark.parametrize("width", WIDTHS)
def test_rotated_norm_and_its_gradients_are_those_of_transformers(
    width: int, batch_of_angles: int, alike: bool
) -> None:
    q_norm, k_norm = norm_of(width), norm_of(width, seed=6)
    q, k = random(2, 67, 4, width), random(2, 67, 2, width, seed=1)
    rotary = angles(batch_of_angles, 67, width, alike=alike, factor=1.25)
    leaves = (q, k, q_norm.weight, k_norm.weight)
    theirs = apply_rotary_pos_emb(q_norm(q).transpose(1, 2), k_norm(k).transpose(1, 2), *rotary)
    upstream = [random(*one.shape, seed=2) for one in theirs]
    results = []
    for output in (normed_and_rotated(q_norm, k_norm, q, k, rotary), theirs):
        results.append([*output, *torch.autograd.grad(output, leaves, upstream)])
    assert_same(*results)


def kept(output: Tensor) -> Tensor:
    """The tensor that the norm's backward pass keeps for x."""
    first: Tensor = output.grad_fn.saved_tensors[0]  # type: ignore[union-attr]
    return first


def test_norm_keeps_its_result_and_not_its_input() -> None:
    x, rotary = random(2, 67, 4, 32), angles(1, 67, 32)
    for output in (
        norm(x, norm_of(32).weight, 1e-6),
        norm(x, norm_of(32).weight, 1e-6, cosines=rotary[0], sines=rotary[1]),
    ):
        assert kept(output).data_ptr() == output.data_ptr()


@pytest.mark.parametrize(("weight", "rotated"), [(0.0, False), (1e-20, False), (0.0, True), (1e-3, True)])
def test_norm_whose_input_cannot_be_restored_keeps_it(weight: float, rotated: bool) -> None:
    module, x = norm_of(32), random(2, 67, 4, 32)
    module.weight.data[5] = weight
    cosines, sines = angles(1, 67, 32) if rotated else (None, None)
    output = norm(x, module.weight, 1e-6, cosines=cosines, sines=sines)
    assert kept(output).data_ptr() == x.data_ptr()
    theirs = module(x)
    if rotated:
        theirs = apply_rotary_pos_emb(theirs.transpose(1, 2), theirs.transpose(1, 2), cosines, sines)[0].transpose(1, 2)
    upstream = random(2, 67, 4, 32, seed=1)
    assert_same(*(list(torch.autograd.grad(one, (x, module.weight), upstream)) for one in (output, theirs)))


def test_keys_without_norms_are_rotated_by_transformers() -> None:
    q, k, rotary = random(1, 5, 4, 8), random(1, 5, 2, 8), angles(1, 5, 8)
    ours = normed_and_rotated(nn.Identity(), nn.Identity(), q, k, rotary)
    assert_same(list(ours), list(apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *rotary)))


def test_feed_forward_and_its_gradients_are_those_of_transformers() -> None:
    module = Qwen3MLP(preset("tiny"))
    x = random(2, 67, 128)
    leaves = (x, *module.parameters())
    upstream = random(2, 67, 128, seed=1)
    results = []
    for output in (fed_forward(module, x), module(x)):
        results.append([output, *torch.autograd.grad(output, leaves, upstream)])
    assert_same(*results)


def test_swiglu_of_extreme_gates_is_finite_and_right() -> None:
    gate = torch.tensor([-1e30, -200.0, -90.0, -1.0, 0.0, 1.0, 90.0, 1e30])
    found = swiglu(gate, torch.ones(8))
    torch.testing.assert_close(found, functional.silu(gate), rtol=1e-5, atol=1e-30)


def test_swiglu_keeps_what_is_not_a_number() -> None:
    gate, up = torch.tensor([float("nan"), 1.0, 1.0]), torch.tensor([1.0, float("nan"), 1.0])
    assert swiglu(gate, up).isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("classes", [1, 7, 64, 1003])
def test_cross_entropy_and_its_gradient_are_those_of_torch(classes: int) -> None:
    logits = random(33, classes).detach() * 10
    labels = torch.arange(33) % classes
    exact = logits.double().requires_grad_()
    losses = functional.cross_entropy(exact, labels, reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), exact)
    found, shares = cross_entropy_(logits, labels)
    softmax = logits.double() * shares.double()[:, None]
    torch.testing.assert_close(found.double(), losses, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(softmax - functional.one_hot(labels, classes), gradient, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 30, 32])
def test_cross_entropy_of_a_row_with_no_maximum_is_not_a_number(strange: float, place: int) -> None:
    logits = torch.zeros(3, 33)
    logits[1, place] = strange
    for found in cross_entropy_(logits, torch.zeros(3, dtype=torch.int64)):
        assert found.isnan().tolist() == [False, True, False]


def test_cross_entropy_refuses_a_label_beyond_the_classes() -> None:
    with pytest.raises(ValueError, match="a label is negative or not below the number of classes"):
        cross_entropy_(torch.zeros(2, 4), torch.tensor([0, 4]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_cross_entropy_takes_labels_of_any_integer_type(dtype: torch.dtype) -> None:
    logits, labels = random(5, 9).detach(), torch.arange(5)
    expected, _ = cross_entropy_(logits.clone(), labels)
    found, _ = cross_entropy_(logits.clone(), labels.to(dtype))
    assert torch.equal(found, expected)


def test_cross_entropy_refuses_labels_of_another_number_or_kind() -> None:
    with pytest.raises(ValueError, match=r"one for each row, got shape \(3,\)"):
        cross_entropy_(torch.zeros(2, 4), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^labels must be integers, got torch\.float32;"):
        cross_entropy_(torch.zeros(2, 4), torch.zeros(2))


def test_steps_do_not_depend_on_the_number_of_threads() -> None:
    module, x = norm_of(32), random(2, 67, 4, 32)
    rotary = angles(1, 67, 32)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            output = norm(x, module.weight, 1e-6, cosines=rotary[0], sines=rotary[1])
            results.append([output, *torch.autograd.grad(output.square().sum(), (x, module.weight))])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_rotation_of_an_odd_width_is_refused() -> None:
    cosines, sines = angles(1, 5, 9)
    with pytest.raises(ValueError, match="size"):
        norm(random(1, 5, 2, 9), torch.ones(9), 1e-6, cosines=cosines, sines=sines)


def test_narrow_numbers_are_left_to_transformers() -> None:
    module = norm_of(32).bfloat16()
    x = random(1, 5, 32).detach().bfloat16()
    assert torch.equal(normed(module, x), module(x))
