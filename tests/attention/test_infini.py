"""Infini-attention: what its memory reads, that it stays small, and that no document or row sees another's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention.mechanisms import SHAPE
from varifocal import Causal, Compressed, HeadShape, attend, make_mechanism
from varifocal.attention.attend import evaluate
from varifocal.attention.mechanisms.infini import Infini, features
from varifocal.attention.memories import SegmentsInMatrix
from varifocal.equations.layout import make_layout

LENGTH = 23


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    drawn = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return drawn.to(dtype)


def inputs(batch: int = 2, length: int = LENGTH, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    return (
        normal(batch, length, SHAPE.model_width, seed=0, dtype=dtype),
        normal(batch, SHAPE.heads, length, SHAPE.head_width, seed=1, dtype=dtype),
        normal(batch, SHAPE.kv_heads, length, SHAPE.head_width, seed=2, dtype=dtype),
        normal(batch, SHAPE.kv_heads, length, SHAPE.head_width, seed=3, dtype=dtype),
    )


def mechanism(dtype: torch.dtype = torch.float64, **options: Any) -> Infini:
    made = make_mechanism("infini", SHAPE, **({"segment": 4} | options)).to(dtype)
    assert isinstance(made, Infini)
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter.copy_(0.5 * normal(*parameter.shape, seed=20 + number))
    return made


def the_papers(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, segment: int, *, delta: bool) -> Tensor:
    """The paper's loop over segments, for one text: q [H, T, D], k and v [H, T, D], gate [H]."""
    heads, length, width = q.shape
    matrix, norm = q.new_zeros(heads, width, width), q.new_zeros(heads, width, 1)
    outputs = []
    for begin in range(0, length, segment):
        a, b, c = (one[:, begin : begin + segment] for one in (q, k, v))
        scores = a @ b.mT / width**0.5
        near = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf")).softmax(dim=-1) @ c
        reading, writing = torch.nn.functional.elu(a) + 1, torch.nn.functional.elu(b) + 1
        if begin == 0:
            outputs.append(near)
        else:
            far = reading @ matrix / (reading @ norm)
            outputs.append(gate[:, None, None] * near + (1 - gate[:, None, None]) * far)
        known = writing @ matrix / (writing @ norm) if delta and begin else 0.0
        matrix, norm = matrix + writing.mT @ (c - known), norm + writing.sum(dim=1)[..., None]
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("delta", [False, True])
def test_it_computes_the_papers_loop(delta: bool) -> None:
    made = mechanism(delta=delta, rotary="none")
    x, q, k, v = inputs(batch=1)
    assert made.gate.static is not None
    keys, values = (one[0].repeat_interleave(2, dim=0) for one in (k, v))
    wanted = the_papers(q[0], keys, values, made.gate.static.sigmoid(), 4, delta=delta)
    torch.testing.assert_close(made(x, q, k, v, backend="reference").output[0], wanted)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("layout", ["text", "packed", "few"])
def test_products_of_segments_are_as_accurate_as_all_pairs(delta: bool, layout: str) -> None:
    documents = torch.tensor([[-1] * 3 + [0] * 11 + [1] * 9, [0] * LENGTH]) if layout == "packed" else None
    found: dict[tuple[str, torch.dtype], list[Tensor]] = {}
    for backend, dtype in (("reference", torch.float64), ("reference", torch.float32), ("native", torch.float32)):
        made = mechanism(dtype, delta=delta)
        leaves = [one.requires_grad_() for one in inputs(dtype=dtype)]
        if layout == "few":
            remembered = made.memory()
            remembered.records_past = True
            x, q, k, v = leaves
            output = made.read(x[:, -3:], q[:, :, -3:], remembered.append(x, q, k, v), backend=backend).output
        else:
            output = made(*leaves, documents=documents, backend=backend).output
        wanted = [*leaves[1:], *made.parameters()]
        gradients = torch.autograd.grad(output, wanted, normal(*output.shape, seed=9, dtype=dtype))
        found[backend, dtype] = [one.detach().double() for one in (output, *gradients)]
    truth, plain, fast = found.values()
    for true, known, one in zip(truth, plain, fast, strict=True):
        # Sums of a segment are taken in another order: a few roundings of the largest entry.
        allowed = 2 * max(float((known - true).abs().max()), 1e-6 * float(true.abs().max()))
        assert float((one - true).abs().max()) <= allowed


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("chunks", [[1] * LENGTH, [9, *[1] * 14], [3, 7, 1, 1, 11]], ids=str)
def test_rows_at_different_places_decode_as_they_were_read(delta: bool, backend: str, chunks: list[int]) -> None:
    dtype = torch.float64 if backend == "reference" else torch.float32
    made = mechanism(dtype, delta=delta)
    x, q, k, v = inputs(dtype=dtype)
    documents = torch.tensor([[-1] * 3 + [0] * 9 + [1] * 11, [0] * LENGTH])
    whole = made(x, q, k, v, documents=documents, backend=backend).output
    memory, begin, parts = made.memory(), 0, []
    for size in chunks:
        end = begin + size
        layout = make_layout(
            batch=2, queries=size, keys=end, documents=documents[:, :end], positions=None, device=x.device
        )
        new = (x[:, begin:end], *(one[:, :, begin:end] for one in (q, k, v)))
        parts.append(made(*new, memory=memory, layout=layout, backend=backend).output)
        begin = end
    torch.testing.assert_close(torch.cat(parts, dim=2), whole, rtol=1e-4, atol=1e-5)


def test_memory_is_bounded_and_does_not_keep_the_text() -> None:
    made = mechanism(torch.float32)
    sizes = []
    memory = made.memory()
    for _ in range(40):
        made(*inputs(dtype=torch.float32), memory=memory)
        sizes.append(memory.bytes)
        kept = memory.read()
        assert kept is not None
        assert kept.k.shape[2] < 4
    assert memory.length == 40 * LENGTH
    assert max(sizes[20:]) <= max(sizes[:20])


def test_tokens_are_taken_back_if_the_past_is_recorded_and_refused_otherwise() -> None:
    made = mechanism()
    x, q, k, v = inputs()

    def part(begin: int, end: int) -> tuple[Tensor, ...]:
        return x[:, begin:end], *(one[:, :, begin:end] for one in (q, k, v))

    whole = made(x, q, k, v).output
    memory = made.memory()
    made(*part(0, 10), memory=memory)
    with pytest.raises(ValueError, match="cannot take back 3 tokens: those before 8 are in a matrix of associations"):
        memory.crop(3)
    memory.records_past = True
    for _ in range(3):
        made(*part(10, 19), memory=memory)
        memory.crop(8)
        again = made(*part(11, 12), memory=memory).output
        torch.testing.assert_close(again, whole[:, :, 11:12])
        memory.crop(2)
    assert memory.length == 10
    torch.testing.assert_close(made(*part(10, LENGTH), memory=memory).output, whole[:, :, 10:])


def test_rows_change_places_with_their_matrices() -> None:
    made = mechanism()
    x, q, k, v = inputs()
    memory = made.memory()
    made(x[:, :10], q[:, :, :10], k[:, :, :10], v[:, :, :10], memory=memory)
    whole = made(x, q, k, v).output[:, :, 10:]
    other = copy.deepcopy(memory)
    other.reorder(torch.tensor([1, 0]))
    order = [1, 0]
    turned = made(x[order, 10:], *(one[order, :, 10:] for one in (q, k, v)), memory=other).output
    torch.testing.assert_close(turned, whole[order])
    memory.repeat(2)
    twice = [0, 0, 1, 1]
    repeated = made(x[twice, 10:], *(one[twice, :, 10:] for one in (q, k, v)), memory=memory).output
    torch.testing.assert_close(repeated, whole[twice])


def test_a_segment_of_the_whole_context_is_dense_attention() -> None:
    made = make_mechanism("infini", SHAPE, segment=LENGTH, rotary="model").double()
    x, q, k, v = inputs()
    torch.testing.assert_close(made(x, q, k, v).output, attend(q, k, v, branches=Causal()).output)


def test_the_gate_moves_and_tells_where_it_decides() -> None:
    made = mechanism()
    found = made(*inputs())
    assert found.records["decides"].tolist() == [[place >= 4 for place in range(LENGTH)]] * 2
    (gradient,) = torch.autograd.grad(found.output.square().sum(), list(made.parameters()))
    assert bool((gradient != 0).all())


def test_weights_of_keys_leave_out_what_is_in_the_matrix() -> None:
    made = mechanism()
    x, q, k, v = inputs()
    memory = made.memory()
    made(x[:, :13], *(one[:, :, :13] for one in (q, k, v)), memory=memory)
    last = made(x[:, 13:14], *(one[:, :, 13:14] for one in (q, k, v)), memory=memory)
    assert last.equation is not None
    assert last.layout is not None
    kept = last.layout.keys
    alone = evaluate(
        last.equation.of_keys(),
        q[:, :, 13:14],
        k[:, :, 14 - kept : 14],
        torch.zeros_like(k[:, :, 14 - kept : 14]),
        layout=last.layout,
    )
    assert not bool(alone.output.any())
    assert bool(last.output.any())


def test_features_are_positive_and_padding_has_none() -> None:
    assert bool((features(torch.linspace(-20, 20, 41)) > 0).all())
    assert features(torch.tensor([float("nan")])).item() == 1.0


def test_memory_of_wide_heads_counts_its_matrix() -> None:
    made = make_mechanism("infini", HeadShape(), segment=256)
    memory = made.memory()
    assert isinstance(memory, SegmentsInMatrix)
    assert memory.kept(8191) == 255 + 129 / 2
    assert memory.kept(100) == 100


def test_features_that_do_not_fit_are_told() -> None:
    q = k = torch.ones(1, 4, 6, 3)
    with pytest.raises(ValueError, match="Compressed must have one width F"):
        attend(q, k, k, branches=Compressed(2, q, torch.ones(1, 4, 6, 2)))
    with pytest.raises(ValueError, match="give it a branch of its own, not a union"):
        attend(q, k, k, branches=Causal() | Compressed(2, q, k))
