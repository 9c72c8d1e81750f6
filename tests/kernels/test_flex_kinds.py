"""What a kernel of FlexAttention is generated for: kinds of readings do not share the kernels that torch limits."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
import torch
from torch import Tensor

from tests.cases import CASES_BY_NAME, Case, Sizes
from tests.kernels.accuracy import relative_error
from tests.kernels.flex_calls import problem_of
from varifocal import Branch, Causal, FixedBranch, Prefix, Strided, Window
from varifocal.kernels.flex.backend import make_scene
from varifocal.kernels.flex.compiled import compiled_for, kind, needs_short_pipeline
from varifocal.kernels.flex.compiler_settings import generating
from varifocal.kernels.flex.key_sets import Pattern, Selected
from varifocal.kernels.flex.tiles import make_tiles


def kind_of(*branches: Branch, case: str = "gqa", learns: bool = False) -> Hashable:
    """The kind of the reading of a union of branches."""
    with torch.set_grad_enabled(learns):
        scene = make_scene(problem_of(CASES_BY_NAME[case].make(torch.float32)), torch.float32)
        reading = scene.reading((Pattern(branches),))  # type: ignore[arg-type]
        return kind(reading, make_tiles(reading, at_end=scene.at_end, backward=learns))


def test_each_pattern_has_kernels_of_its_own() -> None:
    patterns: list[tuple[Branch, ...]] = [
        (Causal(),), (Window(5),), (Prefix(3),), (Strided(4),), (Window(5), Prefix(3)), (Window(1),),
    ]  # fmt: skip
    assert len({kind_of(*pattern) for pattern in patterns}) == len(patterns)


def test_sizes_of_windows_and_texts_are_no_part_of_a_kernel() -> None:
    assert kind_of(Window(5)) == kind_of(Window(9))
    assert kind_of(Causal(), case="packed_causal") == kind_of(Causal(), case="left_padded_causal")


def test_one_query_and_gradients_have_kernels_of_their_own() -> None:
    assert kind_of(Causal()) != kind_of(Causal(), case="decode_causal")
    assert kind_of(Causal()) != kind_of(Causal(), learns=True)


def case_of(pattern: Branch, sizes: Sizes) -> Case:
    """A case of one branch that needs no tensors."""
    return Case("pattern", lambda source: pattern, sizes)


def test_many_patterns_in_many_shapes_run_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch raises when one compiled call has too many variants: patterns must not use up each other's."""
    compiler = torch.compile
    # Traced and guarded as ever, but not made into kernels, which would take minutes.
    monkeypatch.setattr(torch, "compile", lambda *given, **options: compiler(*given, **options, backend="eager"))
    compiled_for.cache_clear()
    patterns: list[Branch] = [
        Window(5), Prefix(3), Strided(4), Window(5) | Prefix(3), Window(5) | Strided(4),
    ]  # fmt: skip
    shapes = [Sizes(B=rows, T=queries, S=41) for rows in (1, 2) for queries in (1, 41)]
    try:
        with torch.no_grad():
            for pattern in patterns:
                for sizes in shapes:
                    inputs = case_of(pattern, sizes).make(torch.float32)
                    found, wanted = (inputs.attend(backend).output for backend in ("flex", "reference"))
                    assert relative_error(found, wanted) < 1e-5
    finally:
        compiled_for.cache_clear()


class Odd(FixedBranch):
    """A branch of a user's own, with an attribute that nobody expects."""

    def __init__(self, kept: object) -> None:
        self.kept = kept

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        return key <= query


def test_branch_may_keep_anything() -> None:
    assert kind_of(Odd({"size": 5})) == kind_of(Odd({}))


def test_compiled_backward_can_run_twice() -> None:
    """The conformance rows ask for gradients one at a time; by default a compiled backward gives its buffers away."""

    def squares(x: Tensor) -> Tensor:
        return (x.sin() * x.exp()).cos().sum()

    x = torch.randn(8, requires_grad=True)
    with generating(on_cpu=False):
        y = torch.compile(squares, dynamic=True, backend="aot_eager")(x)
    first, second = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert relative_error(first, torch.autograd.grad(squares(x), x)[0]) < 1e-5


def test_selection_keeps_within_the_memory_of_small_gpus() -> None:
    """An A10 has 101,376 bytes a block, an A100 166,912; `make gpu-check` compiles the kernel for both."""
    scene = make_scene(problem_of(CASES_BY_NAME["gqa"].make(torch.float32)), torch.float32)
    plain = scene.reading((Pattern((Window(5),)),))
    selecting = scene.reading((Selected(torch.zeros(2, 4, 12, 1, dtype=torch.int32), None),))
    assert needs_short_pipeline(selecting, 101_376)
    assert not needs_short_pipeline(selecting, 166_912)
    assert not needs_short_pipeline(plain, 101_376)
