"""FlexAttention, compiled, on a CPU: outputs of every mechanism equal the reference's, and lengths need no new kernels.

A kernel takes some ten seconds to compile. The tests share kernels: they have the same heads and widths throughout, and
lengths and sizes of windows are no part of a kernel.
"""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from tests.cases import CASES_BY_NAME, Case, Sizes
from tests.kernels.accuracy import relative_error
from varifocal import Attended, Causal, HeadShape, Window, attend, conformance, make_mechanism
from varifocal.attention.backends import BACKENDS, UnavailableError
from varifocal.attention.conformance.variants import selected_unit

ROUNDING = 24 * torch.finfo(torch.float32).eps
"""Sums of up to 700 products in another order: the floor that the native kernels are held to as well."""
SHAPE = HeadShape(model_width=12, heads=4, kv_heads=2, head_width=8)


def kernels() -> int:
    """How many kernels have been generated in this process."""
    return int(counters["stats"]["unique_graphs"])


def assert_same(found: Attended, wanted: Attended) -> None:
    """Outputs and logsumexps agree to rounding, and nothing reads nothing in both."""
    assert relative_error(found.output, wanted.output) < ROUNDING
    assert torch.equal(found.logsumexp.isinf(), wanted.logsumexp.isinf())
    finite = wanted.logsumexp.isfinite()
    assert relative_error(found.logsumexp[finite], wanted.logsumexp[finite]) < ROUNDING


KINDS = ("dense", "local", "combiner", "context_adaptive", "head_gated", "sparse_geometric", "focused")
"""One mechanism for each kind of kernel: plain, joined branches, summaries, soft edges and selections, two branches,
scores of pairs, sizes by head. The others are made of the same parts."""


@pytest.mark.parametrize("name", conformance.every_variant())
def test_output_of_every_mechanism_is_the_reference_s(name: str, request: pytest.FixtureRequest) -> None:
    if name not in KINDS and not request.config.getoption("--every-kernel"):
        pytest.skip("compiled with --every-kernel; test_flex_mechanisms runs the same functions uncompiled")
    variant = conformance.every_variant()[name]
    torch.manual_seed(0)
    mechanism = make_mechanism(variant.mechanism, SHAPE, **variant.options)
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.normal_(std=0.5)
        # A selection of more than 8 keys, from a length of 65 on, would be another kernel. 40 keys are not compiled.
        for length in (40, 41, 150 if selected_unit(mechanism) is None else 63):
            x = torch.randn(2, length, 12)
            q, k, v = (torch.randn(2, heads, length, 8) for heads in (4, 2, 2))
            found, wanted = (mechanism(x, q, k, v, backend=backend) for backend in ("flex", "reference"))
            assert relative_error(found.output, wanted.output) < ROUNDING


@pytest.mark.parametrize(
    "name",
    [
        "window_and_causal",
        "cached_window_causal",
        "packed_window_causal",
        "padded_and_packed_window_causal",
        "left_padded_window_causal",
        "cached_packed",
        "positions_out_of_order",
        "closed_weights",
        "top_k",
        "top_k_ties",
        "cached_top_k",
        "packed_top_k",
        "padded_and_packed_top_k",
        "positions",
    ],
)
def test_layouts_are_those_of_the_reference(name: str) -> None:
    inputs = CASES_BY_NAME[name].make(torch.float32)
    with torch.no_grad():
        assert_same(inputs.attend("flex"), inputs.attend("reference"))


def window_and_causal(queries: int, keys: int, *, window: int) -> Case:
    sizes = Sizes(T=queries, S=keys)
    return Case(f"{queries} of {keys}, {window}", lambda source: (Window(window), Causal()), sizes)


def test_other_lengths_and_windows_need_no_other_kernel() -> None:
    with torch.no_grad():
        window_and_causal(39, 39, window=5).make(torch.float32).attend("flex")
        before = kernels()
        for queries, keys, window in ((41, 41, 6), (130, 130, 7), (300, 300, 90), (700, 700, 129), (20, 500, 64)):
            inputs = window_and_causal(queries, keys, window=window).make(torch.float32)
            assert_same(inputs.attend("flex"), inputs.attend("reference"))
    assert kernels() == before


def test_few_keys_are_right_whatever_their_number() -> None:
    """torch's kernel writes past its scores at 8, 24, 40, ... keys (16, 48, ... with wider vectors)."""
    with torch.no_grad():
        for keys in (8, 16, 24, 48, 56, 96, 120):
            for _ in range(4):
                inputs = window_and_causal(keys, keys, window=5).make(torch.float32)
                assert_same(inputs.attend("flex"), inputs.attend("reference"))


def test_one_query_decodes_against_a_cache_of_any_length_with_one_kernel() -> None:
    counted = []
    with torch.no_grad():
        for keys in (30, 200, 301):
            inputs = Case("decode", lambda source: Window(9), Sizes(T=1, S=keys)).make(torch.float32)
            assert_same(inputs.attend("flex"), inputs.attend("reference"))
            counted.append(kernels())
    assert len(set(counted)) == 1


def test_autocast_runs_in_bfloat16_and_answers_in_the_type_of_the_queries() -> None:
    inputs = CASES_BY_NAME["gqa"].make(torch.float32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = inputs.attend("flex")
    assert found.output.dtype == torch.float32
    rounded = inputs.rebuild({name: inputs.tensors[name].bfloat16().float() for name in ("q", "k", "v")})
    wanted = rounded.attend("reference").output.detach()
    error = relative_error(found.output, wanted)
    # Probabilities and the output are rounded to bfloat16; inputs are already, and sums are not.
    assert 0 < error < 4 * torch.finfo(torch.bfloat16).eps


def test_backward_on_a_cpu_is_explained() -> None:
    inputs = CASES_BY_NAME["gqa"].make(torch.float32)
    with pytest.raises(UnavailableError, match=r"backend 'flex' has no backward on a CPU, where torch\.no_grad\(\)"):
        inputs.attend("flex")


def test_width_that_learns_is_a_backward_too() -> None:
    inputs = CASES_BY_NAME["soft_window"].make(torch.float32)
    still = inputs.rebuild({name: inputs.tensors[name].detach() for name in ("q", "k", "v")})
    with pytest.raises(UnavailableError, match="has no backward on a CPU"):
        still.attend("flex")


def test_float64_is_declined_by_name() -> None:
    with pytest.raises(UnavailableError, match=r"'flex' runs float32, bfloat16 and float16, got torch\.float64"):
        CASES_BY_NAME["gqa"].make(torch.float64).attend("flex")


def test_no_queries_give_nothing() -> None:
    inputs = CASES_BY_NAME["no_queries"].make(torch.float32)
    with torch.no_grad():
        assert inputs.attend("flex").output.shape == inputs.q.shape


def test_auto_never_takes_flex_on_a_cpu() -> None:
    q = torch.randn(1, 1, 4, 4, dtype=torch.float16)
    with torch.no_grad():
        before = kernels()
        attend(q, q, q, branches=Causal())
    assert kernels() == before
    assert BACKENDS["flex"].volunteers_on == ("cuda",)
