"""The native kernels as torch operators: compiling, checkpointing, autocast, layouts in memory, threads, mistakes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from varifocal import (
    Causal,
    HeadShape,
    PairGate,
    Prefix,
    SoftWindow,
    TopK,
    Window,
    attend,
    make_mechanism,
)
from varifocal.attention.attend import lay_out
from varifocal.attention.backends import prepare
from varifocal.equations.problem import PoolingProblem, Shortcuts
from varifocal.kernels.native import library
from varifocal.kernels.native.mixture import CAUSAL, DISTANCE_BIAS, MixtureBranch, MixtureInputs, mixture
from varifocal.kernels.native.pair_gate import FORMS
from varifocal.kernels.native.selected import SelectedInputs, attend_selected
from varifocal.kernels.native.window_and_top_k import WindowAndTopKInputs

pytestmark = pytest.mark.skipif(library.why_missing() is not None, reason="the native library was not built")


def heads(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def case(length: int = 120, *, width: int = 32, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    return (
        heads(batch, 4, length, width),
        heads(batch, 2, length, width, seed=1),
        heads(batch, 2, length, width, seed=2),
    )


def gradients(output: Tensor, leaves: tuple[Tensor, ...]) -> list[Tensor]:
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]


def mixed(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    weights = torch.stack((gate, 1 - gate), dim=-1)
    return attend(q, k, v, branches=(SoftWindow(16 + 8 * gate, edge=4, limit=40), TopK()), weights=weights).output


def blocks(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    weights = torch.stack((gate, 1 - gate), dim=-1)
    return attend(q, k, v, branches=(Window(9) | Prefix(2), TopK(select="blocks", block=8)), weights=weights).output


def paired(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    hidden = PairGate(queries=q[..., :3], keys=k.repeat_interleave(2, dim=1)[..., :3], output=gate[0, :, :3])
    return attend(q, k, v, branches=Causal(), score=hidden).output


CALLS: list[Callable[..., Tensor]] = [mixed, blocks, paired]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_compiled_attend_equals_eager_forward_and_backward(call: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    leaves = (*case(), torch.rand(1, 4, 120).requires_grad_())
    eager = gradients(call(*leaves), leaves)
    compiled = gradients(torch.compile(call, fullgraph=True)(*leaves), leaves)
    for one, other in zip(eager, compiled, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_checkpointed_attend_equals_eager(call: Callable[..., Tensor]) -> None:
    leaves = (*case(), torch.rand(1, 4, 120).requires_grad_())
    eager = gradients(call(*leaves), leaves)
    again: Any = checkpoint(call, *leaves, use_reentrant=False)
    assert all(torch.equal(one, other) for one, other in zip(eager, gradients(again, leaves), strict=True))


def test_compiled_mechanism_equals_eager() -> None:
    torch._dynamo.reset()
    mechanism = make_mechanism("head_gated", HeadShape(model_width=16, heads=4, kv_heads=2, head_width=32), window=20)
    x, (q, k, v) = heads(1, 120, 16, seed=5), case()
    compiled = torch.compile(lambda *args: mechanism(*args).output, fullgraph=True)
    for one, other in zip(
        gradients(mechanism(x, q, k, v).output, (q, k, v)), gradients(compiled(x, q, k, v), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


def test_torch_accepts_the_operators() -> None:
    q, k, v = case(24)
    position = torch.arange(24, dtype=torch.int32)[None]
    start, scale = torch.zeros_like(position), torch.full((4,), 0.2).requires_grad_()
    weights, width = torch.rand(1, 4, 24, 2).requires_grad_(), (torch.rand(2, 1, 4, 24) * 9 + 4).requires_grad_()
    windows = MixtureInputs(
        q=q, k=k, v=v, scale=scale, position=position, start=start, weights=weights, width=width,
        window=torch.tensor([[0] * 4, [3, CAUSAL, 7, CAUSAL]], dtype=torch.int32),
        prefix=torch.zeros(2, 4, dtype=torch.int32), limit=[12, 0], edge=[4.0, 0.0], skip_closed=False, save=True,
    )  # fmt: skip
    mixture_operator = torch.ops.varifocal.mixture.default
    torch.library.opcheck(mixture_operator, tuple(windows))
    for table in (heads(4, 9, seed=4), heads(1, 4, 24, 9, seed=4)):
        torch.library.opcheck(mixture_operator, tuple(windows._replace(score=DISTANCE_BIAS, bias_table=table)))
    gated = windows._replace(
        score=FORMS["log"],
        pair_a=heads(1, 4, 24, 3, seed=5),
        pair_b=heads(1, 4, 24, 3, seed=6),
        pair_output=heads(4, 3, seed=7),
        pair_bias=heads(4, seed=8),
    )
    torch.library.opcheck(mixture_operator, tuple(gated), atol=1e-5, rtol=1e-5)
    selected = torch.arange(2, dtype=torch.int32).expand(1, 4, 24, 2).contiguous()
    selected[:, :, 0, 1] = -1
    selection = SelectedInputs(
        q,
        k,
        v,
        scale,
        position,
        start,
        selected,
        torch.rand(1, 4, 24).requires_grad_(),
        block=0,
        include_self=False,
        save=True,
    )
    torch.library.opcheck(torch.ops.varifocal.attend_selected.default, tuple(selection), atol=1e-5, rtol=1e-5)
    assert selection.weights is not None
    for block in (0, 4):  # single keys, and blocks
        both = WindowAndTopKInputs(
            q=q, k=k, v=v, scale=scale, position=position, start=start, weights=weights, width=width,
            selected=torch.full_like(selected, -1) if block else selected, selected_weights=selection.weights,
            window=windows.window, prefix=windows.prefix, limit=[12, 0], edge=[4.0, 0.0], skip_closed=False,
            block=block, include_self=False, save=True,
        )  # fmt: skip
        torch.library.opcheck(torch.ops.varifocal.window_and_top_k.default, tuple(both), atol=1e-5, rtol=1e-5)
    torch.library.opcheck(torch.ops.varifocal.delta.default, (q.detach(), q.detach(), position, start))
    torch.library.opcheck(
        torch.ops.varifocal.select.default,
        (q.detach(), k.detach(), None, position, start, position + 1, 24, 3, 0),
    )


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("length", [1, 97, 700])
def test_long_texts_give_the_same_bits_on_any_number_of_threads(call: Callable[..., Tensor], length: int) -> None:
    leaves = (*case(length, width=64), torch.rand(1, 4, length).clamp(min=0.1).requires_grad_())
    if call is paired and length < 3:
        pytest.skip("the pair gate of this case takes three weights from the text")
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(gradients(call(*leaves), leaves))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


@pytest.mark.parametrize("layout", ["transposed", "misaligned", "every_second", "expanded"])
def test_layout_in_memory_does_not_matter(layout: str) -> None:
    q, k, v = (tensor.detach() for tensor in case(50))
    views: dict[str, Callable[[Tensor], Tensor]] = {
        "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "misaligned": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
        "every_second": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
        "expanded": lambda x: x,
    }
    change = views[layout]
    if layout == "expanded":
        k, v = k[:, :1].expand(-1, 2, -1, -1), v[:, :1].expand(-1, 2, -1, -1)
    expected = attend(q, k.contiguous(), v.contiguous(), branches=(Window(7), TopK()), weights=torch.ones(1, 4, 50, 2))
    found = attend(change(q), change(k), change(v), branches=(Window(7), TopK()), weights=torch.ones(1, 4, 50, 2))
    assert torch.equal(found.output, expected.output)


@pytest.mark.parametrize("branches", [Causal(), Window(40), TopK(), TopK(select="blocks", block=16)], ids=str)
def test_decoding_a_token_equals_the_last_row_of_the_whole(branches: Any) -> None:
    q, k, v = (tensor.detach() for tensor in case(500, width=64))
    whole = attend(q, k, v, branches=branches, backend="native").output
    for queries in (1, 3):
        last = attend(q[:, :, -queries:], k, v, branches=branches, backend="native").output
        torch.testing.assert_close(last, whole[:, :, -queries:], rtol=1e-5, atol=1e-5)


def test_means_kept_token_by_token_select_the_same_blocks() -> None:
    q, k, v = (tensor.detach() for tensor in case(300, batch=2))
    documents = torch.zeros(2, 300, dtype=torch.int64)
    documents[0, :7], documents[1, 130:] = -1, 1
    kept, plain = torch.zeros(2, 2, 19, 32), torch.zeros(2, 2, 19, 32)
    for token in range(300):
        new, so_far = slice(token, token + 1), slice(0, token + 1)
        layout = lay_out(q[:, :, new], k[:, :, so_far], v[:, :, so_far], documents=documents[:, so_far])
        for backend, means in (("native", kept), ("reference", plain)):
            prepare(backend, PoolingProblem(means, k[:, :, new], layout, 16), device="cpu")()
    torch.testing.assert_close(kept, plain)
    for end in (20, 131, 300):
        now, past = slice(end - 1, end), slice(0, end)
        found, expected = (
            attend(
                q[:, :, now], k[:, :, past], v[:, :, past], documents=documents[:, past],
                branches=TopK(scale=4, select="blocks", block=16), shortcuts=shortcuts,
            ).output
            for shortcuts in (Shortcuts(block_means=kept[:, :, : math.ceil(end / 16)]), None)
        )  # fmt: skip
        torch.testing.assert_close(found, expected)


def test_branch_of_weight_zero_is_left_out_without_changing_the_output() -> None:
    q, k, v = (tensor.detach() for tensor in case(300))
    weights = torch.rand(1, 4, 300, 2)
    weights[:, 0, :, 1], weights[:, 1, :, 0], weights[:, 2] = 0, 0, 0
    found, expected = (
        attend(q, k, v, branches=(Window(20), Causal()), weights=weights, backend=backend).output
        for backend in ("native", "reference")
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_weight_of_zero_still_gets_its_gradient() -> None:
    q, k, v = (tensor.detach() for tensor in case(150))
    weights = torch.zeros(1, 4, 150, 2, requires_grad=True)
    found, expected = (
        gradients(attend(q, k, v, branches=(Window(20), Causal()), weights=weights, backend=b).output, (weights,))[1]
        for b in ("native", "reference")
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert found.abs().min() > 0


def test_autocast_keeps_the_output_in_the_queries_type() -> None:
    q, k, v = (tensor.detach() for tensor in case(50))
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(q, k, v, branches=Causal()).output
    assert found.dtype == torch.float32
    assert torch.equal(found, attend(q, k, v, branches=Causal()).output)


def test_unknown_target_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VARIFOCAL_TARGET", "avx1024")
    with pytest.raises(ValueError, match="VARIFOCAL_TARGET is 'avx1024'; this library and processor run"):
        attend(*case(4), branches=Causal(), backend="native")


@pytest.mark.parametrize(
    ("position", "start", "branch", "sentence"),
    [
        (9, 0, MixtureBranch(window=CAUSAL), "position"),
        (3, -1, MixtureBranch(window=CAUSAL), "start"),
        (3, 0, MixtureBranch(window=-1), "negative window"),
        (3, 0, MixtureBranch(prefix=-2), "prefix"),
    ],
)
def test_bad_arguments_of_a_kernel_become_a_value_error(
    position: int, start: int, branch: MixtureBranch, sentence: str
) -> None:
    q, k, v = (tensor.detach() for tensor in case(4))
    at = torch.full((1, 4), position, dtype=torch.int32)
    with pytest.raises(ValueError, match=sentence):
        mixture(q, k, v, branches=[branch], position=at, start=torch.full_like(at, start))


@pytest.mark.parametrize("selected", [(5, 5), (6, 5), (21, -1), (20, 1000)], ids=str)
def test_selection_that_is_out_of_order_or_not_visible_is_an_error(selected: tuple[int, int]) -> None:
    q, k, v = (tensor.detach() for tensor in case(40))
    selection = torch.full((1, 4, 40, 2), -1, dtype=torch.int32)
    selection[0, 0, 20] = torch.tensor(selected)
    position = torch.arange(40, dtype=torch.int32)[None]
    with pytest.raises(ValueError, match="selected keys or blocks"):
        attend_selected(q, k, v, selection, position=position, start=torch.zeros_like(position))
