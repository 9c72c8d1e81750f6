"""Products of weights with a few vectors, held to float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from varifocal.kernels.native import library
from varifocal.kernels.steps.few_rows import MOST, linear_of_few

pytestmark = pytest.mark.skipif(library.why_missing() is not None, reason="the native library was not built")


def narrowed(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """int8 weights and their scales, one for each `group` columns of a row."""
    parts = weight.view(len(weight), -1, group)
    scales = parts.abs().amax(dim=-1) / 127
    return (parts / scales[..., None]).round().to(torch.int8).view_as(weight), scales


@pytest.mark.parametrize("target", list(library.targets()) if library.why_missing() is None else [])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, MOST])
@pytest.mark.parametrize(("outputs", "columns"), [(1, 1), (7, 5), (70, 33), (3, 16), (129, 64), (300, 576)])
def test_every_kind_of_weight_is_as_right_as_float32_allows(
    target: str, rows: int, outputs: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VARIFOCAL_TARGET", target)
    torch.manual_seed(rows * outputs + columns)
    x, weight, bias = torch.randn(rows, columns), torch.randn(outputs, columns), torch.randn(outputs)
    allowed = 4e-7 * (x.abs().double() @ weight.abs().double().mT + bias.abs()) + 1e-30
    for kind in (weight, weight.bfloat16()):
        for added in (bias, None):
            truth = x.double() @ kind.double().mT + (0 if added is None else added.double())
            assert ((linear_of_few(x, kind, added) - truth).abs() <= allowed).all()
    for group in (16, 32, 64):
        if columns % group == 0:
            values, scales = narrowed(weight, group)
            wide = (values.double().view(outputs, -1, group) * scales.double()[..., None]).view_as(weight)
            truth = x.double() @ wide.mT + bias
            assert ((linear_of_few(x, values, bias, scales) - truth).abs() <= allowed).all()


def test_numbers_do_not_depend_on_the_number_of_threads() -> None:
    x, weight, before = torch.randn(3, 576), torch.randn(5000, 576), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.append(linear_of_few(x, weight))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_more_vectors_than_few_are_refused() -> None:
    with pytest.raises(ValueError, match="a size is out of range"):
        linear_of_few(torch.randn(MOST + 1, 8), torch.randn(4, 8))
