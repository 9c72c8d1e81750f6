"""Windows and prefixes of their own for each head, and biases by distance, against the equation written out."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.kernels.accuracy import ROUNDINGS, relative_error
from varifocal.kernels.native import library
from varifocal.kernels.native.mixture import CAUSAL, MixtureBranch, mixture
from varifocal.kernels.native.pair_gate import PairForm, pair_gate

pytestmark = pytest.mark.skipif(library.why_missing() is not None, reason="the native library was not built")
TARGETS = [] if library.why_missing() is not None else list(library.targets())
WINDOWS = [torch.tensor([1, 5, 40, CAUSAL], dtype=torch.int32), torch.tensor([70, 3, CAUSAL, 2], dtype=torch.int32)]
PREFIXES = [torch.tensor([0, 2, 0, 7], dtype=torch.int32), torch.tensor([1, 0, 3, 0], dtype=torch.int32)]


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("VARIFOCAL_TARGET", request.param)
    return str(request.param)


class Call(NamedTuple):
    """Two texts of four heads: the second holds two documents, the first begins with padding."""

    q: Tensor
    k: Tensor
    v: Tensor
    weights: Tensor
    width: Tensor
    position: Tensor
    start: Tensor

    def leaves(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.weights, self.width

    def widened(self) -> Call:
        """The same numbers in float64; again leaves."""
        q, k, v, weights, width = (x.detach().double().requires_grad_() for x in self.leaves())
        return Call(q, k, v, weights, width, self.position, self.start)

    def last(self, queries: int) -> Call:
        """The same keys, and only the last queries."""
        rows = (self.q, self.weights, self.width)
        q, weights, width = (part[:, :, -queries:].detach() for part in rows)
        position, start = self.position[:, -queries:], self.start[:, -queries:]
        return Call(q, self.k.detach(), self.v.detach(), weights, width, position, start)


def drawn(length: int, dtype: torch.dtype = torch.float32, *, branches: int = 1, head_width: int = 24) -> Call:
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    position = torch.arange(length, dtype=torch.int32).repeat(2, 1)
    start = torch.zeros_like(position)
    start[0, :3], start[0, 3:] = length, 3
    start[1, length // 2 :] = length // 2
    q, k, v = (normal(2, heads, length, head_width).to(dtype).requires_grad_() for heads in (4, 2, 2))
    weights = normal(2, 4, length, branches).requires_grad_()
    width = (4 + 20 * torch.rand(2, 4, length, generator=generator)).requires_grad_()
    return Call(q, k, v, weights, width, position, start)


def written_out(
    call: Call, branches: list[MixtureBranch], scores: Tensor, weights: Tensor | None, width: Tensor | None = None
) -> Tensor:
    """The mixture over all pairs, from scores [B, H, T, S]."""
    key = torch.arange(call.k.shape[2])
    x = (call.position[..., None] - key)[:, None]  # [B, 1, T, S]
    place = (key - call.start[..., None])[:, None]
    total = torch.zeros_like(scores[..., :1])
    for m, branch in enumerate(branches):
        window, prefix = (torch.as_tensor(n).view(-1, 1, 1) for n in (branch.window, branch.prefix))
        read = ((x < window) | (place < prefix)) & (x >= 0) & (place >= 0)
        omega = read.to(scores.dtype)
        if branch.width is not None and width is not None:
            soft = ((width[..., None] - x) / branch.edge).clamp(0, 1) * ((x < branch.limit) & (x >= 0) & (place >= 0))
            omega = torch.maximum(omega, soft)
        # A query that reads nothing gets 0, and no gradient comes out of what is not read.
        read = (omega > 0) & (scores > float("-inf"))
        safe = scores.masked_fill(~read, 0.0)
        powers = (safe - safe.detach().amax(dim=-1, keepdim=True)).exp() * omega * read
        whole = powers.sum(dim=-1, keepdim=True)
        share = powers / torch.where(whole > 0, whole, 1.0)
        total = total + share * (1.0 if weights is None else weights[..., m : m + 1])
    output: Tensor = total @ call.v.to(scores.dtype).repeat_interleave(2, dim=1)
    return output


def dots(q: Tensor, k: Tensor) -> Tensor:
    scores: Tensor = q @ k.repeat_interleave(2, dim=1).transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores


def biased(table: Tensor, position: Tensor, keys: int) -> Tensor:
    """The entries of a table [H, N] or [B, H, T, N] at the distances of all pairs: [B, H, T, S]."""
    at = (position[..., None] - torch.arange(keys)).clamp(0, table.shape[-1] - 1).long()  # [B, T, S]
    if table.dim() == 2:
        return table[:, at].transpose(0, 1)
    return table.gather(-1, at[:, None].expand(-1, table.shape[1], -1, -1))


def assert_alike(found: list[Tensor], exact: list[Tensor], dtype: torch.dtype) -> None:
    allowed = ROUNDINGS * torch.finfo(dtype).eps
    for number, (one, other) in enumerate(zip(found, exact, strict=True)):
        assert relative_error(one.detach(), other.detach()) < allowed, number


def gradients(output: Tensor, leaves: tuple[Tensor, ...]) -> list[Tensor]:
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return [output, *torch.autograd.grad(output, leaves, upstream.to(output.dtype))]


def mixed(soft: Tensor | None = None) -> list[MixtureBranch]:
    first, second = (MixtureBranch(window=w, prefix=p) for w, p in zip(WINDOWS, PREFIXES, strict=True))
    if soft is not None:
        first = MixtureBranch(window=WINDOWS[0], prefix=PREFIXES[0], width=soft, edge=4.0, limit=30)
    return [first, second]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1, 37, 300])
def test_heads_read_windows_and_prefixes_of_their_own(length: int, dtype: torch.dtype, target: str) -> None:
    call = drawn(length, dtype, branches=2)
    wide = call.widened()
    found = mixture(
        call.q, call.k, call.v, branches=mixed(call.width), position=call.position, start=call.start,
        weights=call.weights,
    ).output  # fmt: skip
    exact = written_out(wide, mixed(wide.width), dots(wide.q, wide.k), wide.weights, wide.width)
    assert_alike(gradients(found, call.leaves()), gradients(exact, wide.leaves()), dtype)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decoded_tokens_read_windows_of_their_heads(queries: int, dtype: torch.dtype, target: str) -> None:
    call = drawn(600, dtype, branches=2).last(queries)
    wide = call.widened()
    found = mixture(
        call.q, call.k, call.v, branches=mixed(call.width), position=call.position, start=call.start,
        weights=call.weights,
    ).output  # fmt: skip
    exact = written_out(wide, mixed(wide.width), dots(wide.q, wide.k), wide.weights, wide.width)
    assert_alike([found], [exact], dtype)


def test_windows_that_are_alike_in_every_head_give_the_bits_of_one_number() -> None:
    call = drawn(150)
    found = [
        gradients(
            mixture(
                call.q, call.k, call.v, branches=[MixtureBranch(window=window, prefix=prefix)],
                position=call.position, start=call.start,
            ).output,
            (call.q, call.k, call.v),
        )
        for window, prefix in (
            (20, 3),
            (torch.full((4,), 20, dtype=torch.int32), torch.full((4,), 3, dtype=torch.int32)),
        )
    ]  # fmt: skip
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("kind", ["head", "query"])
@pytest.mark.parametrize("distances", [2, 7, 64, 400])
@pytest.mark.parametrize("length", [1, 37, 300])
def test_bias_by_distance_and_its_gradient(kind: str, distances: int, length: int, target: str) -> None:
    call = drawn(length, branches=2)
    shape = (4, distances) if kind == "head" else (2, 4, length, distances)
    table = torch.randn(*shape, generator=torch.Generator().manual_seed(7)).requires_grad_()
    wide = call.widened()
    exact_table = table.detach().double().requires_grad_()
    found = mixture(
        call.q, call.k, call.v, branches=mixed(call.width), position=call.position, start=call.start,
        weights=call.weights, bias_table=table,
    ).output  # fmt: skip
    scores = dots(wide.q, wide.k) + biased(exact_table, call.position, length)
    exact = written_out(wide, mixed(wide.width), scores, wide.weights, wide.width)
    assert_alike(
        gradients(found, (*call.leaves(), table)), gradients(exact, (*wide.leaves(), exact_table)), torch.float32
    )


@pytest.mark.parametrize("shape", [(4, 1), (2, 4, 150, 1)], ids=str)
def test_one_bias_for_all_distances_changes_nothing(shape: tuple[int, ...], target: str) -> None:
    call, table = drawn(150), torch.full(shape, 0.5).requires_grad_()
    found, plain = (
        mixture(
            call.q, call.k, call.v, branches=[MixtureBranch(window=CAUSAL)],
            position=call.position, start=call.start, bias_table=bias,
        ).output
        for bias in (table, None)
    )  # fmt: skip
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)
    # The sum over keys of dS = p (dP - delta) is 0, but for roundings of dP, which is up to 20 here.
    assert gradients(found, (table,))[1].abs().max() < 20 * ROUNDINGS * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("kind", ["head", "query"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("queries", [1, 3, 40])
def test_decoded_tokens_have_the_bias_of_their_distances(
    kind: str, dtype: torch.dtype, queries: int, target: str
) -> None:
    call = drawn(600, dtype).last(queries)
    shape = (4, 90) if kind == "head" else (2, 4, queries, 90)
    table = torch.randn(*shape, generator=torch.Generator().manual_seed(7))
    branches = [MixtureBranch(window=WINDOWS[1], prefix=PREFIXES[0])]
    found = mixture(
        call.q, call.k, call.v, branches=branches, position=call.position, start=call.start, bias_table=table
    ).output
    wide = call.widened()
    scores = dots(wide.q, wide.k) + biased(table.double(), call.position, 600)
    assert_alike([found], [written_out(wide, branches, scores, None)], dtype)


def test_bias_of_minus_infinity_is_a_window() -> None:
    call = drawn(200)
    table = torch.zeros(4, 21)
    table[:, 20] = float("-inf")
    found, expected = (
        gradients(
            mixture(
                call.q, call.k, call.v, branches=[MixtureBranch(window=window)],
                position=call.position, start=call.start, bias_table=bias,
            ).output,
            (call.q, call.k, call.v),
        )
        for window, bias in ((CAUSAL, table), (20, None))
    )  # fmt: skip
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("kind", ["head", "query"])
def test_gradient_of_a_bias_does_not_depend_on_the_number_of_threads(kind: str, threads: int) -> None:
    call = drawn(700)
    shape = (4, 300) if kind == "head" else (2, 4, 700, 300)
    table = torch.randn(*shape, generator=torch.Generator().manual_seed(7)).requires_grad_()
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            output = mixture(
                call.q, call.k, call.v, branches=[MixtureBranch(window=CAUSAL)],
                position=call.position, start=call.start, bias_table=table,
            ).output  # fmt: skip
            found.append(gradients(output, (call.q, call.k, call.v, table)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("form", ["product", "log", "threshold"])
def test_pair_gates_mix_branches_of_several_kinds(form: PairForm, target: str) -> None:
    call = drawn(130, branches=2)
    generator = torch.Generator().manual_seed(11)
    a, b, output, bias, scale = (
        torch.randn(*shape, generator=generator).requires_grad_()
        for shape in ((2, 4, 130, 5), (2, 4, 130, 5), (4, 5), (4,), (4,))
    )
    own = (a, b, output, bias, scale)
    wide = call.widened()
    exact_own = tuple(x.detach().double().requires_grad_() for x in own)
    wide_a, wide_b, wide_output, wide_bias, wide_scale = exact_own
    found = pair_gate(
        call.q, call.k, call.v, a, b, output=output, bias=bias, scale=scale, form=form, threshold=0.3,
        position=call.position, start=call.start, branches=mixed(call.width), weights=call.weights,
    ).output  # fmt: skip
    hidden = torch.nn.functional.gelu(wide_a[:, :, :, None] + wide_b[:, :, None])
    logits = (hidden * wide_output[:, None, None]).sum(-1) + wide_bias[:, None, None]
    alpha = dots(wide.q, wide.k) * wide_scale[:, None, None]
    scores = alpha * logits.sigmoid() if form == "product" else alpha + torch.nn.functional.logsigmoid(logits)
    if form == "threshold":
        scores = scores.masked_fill(logits.sigmoid() < 0.3, float("-inf"))
    exact = written_out(wide, mixed(wide.width), scores, wide.weights, wide.width)
    assert_alike(
        gradients(found, (*call.leaves(), *own)), gradients(exact, (*wide.leaves(), *exact_own)), torch.float32
    )


@pytest.mark.parametrize(
    ("branch", "table", "sentence"),
    [
        (
            MixtureBranch(window=torch.ones(3, dtype=torch.int32)),
            None,
            r"window must be a number or int32 \[H\] = \[4\]",
        ),
        (MixtureBranch(prefix=torch.ones(4)), None, r"prefix must be .* got torch.float32 \[4\]"),
        (MixtureBranch(window=torch.tensor([1, 1, -1, 1], dtype=torch.int32)), None, "negative window"),
        (MixtureBranch(window=1), torch.zeros(3, 5), r"a table of biases must be \[H, N\] or \[B, H, T, N\]"),
        (MixtureBranch(window=1), torch.zeros(4, 0), "its table is empty"),
    ],
)
def test_what_does_not_fit_the_heads_is_an_error(branch: MixtureBranch, table: Tensor | None, sentence: str) -> None:
    call = drawn(9)
    with pytest.raises(ValueError, match=sentence):
        mixture(call.q, call.k, call.v, branches=[branch], position=call.position, start=call.start, bias_table=table)
