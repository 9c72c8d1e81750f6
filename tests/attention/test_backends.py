"""A backend runs what it knows and says what it does not; it is loaded when it is first asked for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from varifocal import Causal, Dot, FixedBranch, ReferenceWarning, TopK, Window, attend
from varifocal.attention.attend import lay_out
from varifocal.attention.backends import BACKENDS, LOADED, UnavailableError, is_loaded, prepare, used_parts
from varifocal.equations.normalizers import Normalizer
from varifocal.equations.problem import DivergenceProblem, PoolingProblem, Problem, Shortcuts, SummaryProblem
from varifocal.kernels.native import backend as native
from varifocal.kernels.native import library

needs_native = pytest.mark.skipif(library.why_missing() is not None, reason="the native library was not built")
every_backend = pytest.mark.parametrize("name", BACKENDS)


@dataclass(frozen=True, eq=False)
class CappedProblem(Problem):
    """A problem with a part that no backend has heard of."""

    cap: float | None = None
    sinks: tuple[int, ...] = field(default_factory=tuple)


@dataclass(frozen=True)
class Entmax(Normalizer):
    """A normalizer that no backend has heard of."""


@dataclass(frozen=True)
class EvenPlaces(FixedBranch):
    """A branch that no kernel has heard of."""

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        return (key % 2 == 0) & (key <= query)


def problem(kind: type[Problem] = Problem, **parts: Any) -> Problem:
    q = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    return kind(q, q, q, (Causal(),), None, Dot(), lay_out(q, q, q), **parts)


def stand_in(
    monkeypatch: pytest.MonkeyPatch, name: str, answer: Callable[[Any], Any], honours: frozenset[str]
) -> list[Any]:
    """Put a module in the place of a backend's; the problems that it is given are listed in the answer."""
    asked: list[Any] = []

    def prepared(problem: Any) -> Any:
        asked.append(problem)
        return answer(problem)

    unlearned = {"recall": lambda asked: None, "learn": lambda asked: None}
    module = SimpleNamespace(HONOURS=honours, prepare=prepared, **unlearned)
    monkeypatch.setitem(LOADED, BACKENDS[name].module, module)
    return asked


@every_backend
@pytest.mark.parametrize(("part", "value"), [("cap", 30.0), ("sinks", (1, 2))])
def test_part_that_a_backend_does_not_list_is_refused_by_name(name: str, part: str, value: Any) -> None:
    sentence = f"^backend '{name}' does not know the {part} of a problem; use backend='auto' or 'reference'$"
    with torch.no_grad(), pytest.raises(UnavailableError, match=sentence):
        prepare(name, problem(CappedProblem, **{part: value}), device="cpu")


def test_auto_passes_over_a_backend_that_does_not_list_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    known = frozenset(used_parts(problem())) | {"normalizer", "shortcuts"}
    first = stand_in(monkeypatch, "native", lambda problem: lambda: "native", known)
    last = stand_in(monkeypatch, "reference", lambda problem: lambda: "reference", known | {"cap"})
    assert prepare("auto", problem(CappedProblem, cap=30.0), device="cpu")() == "reference"
    assert (len(first), len(last)) == (0, 1)


def test_part_that_is_left_out_is_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    known = frozenset(used_parts(problem()))
    stand_in(monkeypatch, "native", lambda problem: lambda: "native", known)
    assert used_parts(problem(CappedProblem)) == used_parts(problem())
    assert prepare("auto", problem(CappedProblem), device="cpu")() == "native"


def test_auto_with_a_part_that_nobody_lists_says_so() -> None:
    sentence = r"^no backend can run this problem on cpu: .*backend 'reference' does not know the cap of a problem$"
    with pytest.raises(UnavailableError, match=sentence):
        prepare("auto", problem(CappedProblem, cap=30.0), device="cpu")


@every_backend
def test_normalizer_that_a_backend_does_not_know_is_refused_by_name(name: str) -> None:
    with torch.no_grad(), pytest.raises(ValueError, match=r"normalizer.*Entmax"):
        prepare(name, problem(normalizer=Entmax()), device="cpu")()


@needs_native
def test_auto_passes_over_a_backend_without_the_branch() -> None:
    q = torch.randn(1, 2, 9, 4)
    with pytest.raises(UnavailableError, match="has no kernel for the branch EvenPlaces"):
        attend(q, q, q, branches=EvenPlaces(), backend="native")
    found = attend(q, q, q, branches=EvenPlaces()).output
    assert torch.equal(found, attend(q, q, q, branches=EvenPlaces(), backend="reference").output)


@every_backend
def test_problem_of_another_kind_is_refused_by_name(name: str) -> None:
    @dataclass(frozen=True)
    class Riddle:
        q: int = 1

    with pytest.raises(UnavailableError, match=f"^backend '{name}' does not know the problem Riddle; use backend="):
        prepare(name, Riddle(), device="cpu")


@every_backend
def test_every_part_that_a_backend_lists_belongs_to_a_problem(name: str) -> None:
    kinds = (Problem, DivergenceProblem, PoolingProblem, SummaryProblem)
    known = {part for kind in kinds for part in kind.__dataclass_fields__}
    assert is_loaded(BACKENDS[name].module)
    assert known >= LOADED[BACKENDS[name].module].HONOURS


def test_unknown_backend_is_refused_with_the_known_ones() -> None:
    known = "'auto', 'native', 'flex', 'triton', 'reference'"
    with pytest.raises(ValueError, match=rf"^unknown backend 'fast'; known are {known}$"):
        prepare("fast", problem(), device="cpu")


@pytest.mark.parametrize(("device", "order"), [("cpu", ["native", "reference"]), ("cuda", ["flex", "reference"])])
def test_auto_asks_those_that_volunteer_on_the_device_in_order(
    monkeypatch: pytest.MonkeyPatch, device: str, order: list[str]
) -> None:
    asked: list[str] = []

    def decline(name: str) -> Callable[[Any], Any]:
        def answer(problem: Any) -> Any:
            asked.append(name)
            return "is asleep" if name != "reference" else lambda: name

        return answer

    for name in BACKENDS:
        stand_in(monkeypatch, name, decline(name), frozenset(Problem.__dataclass_fields__))
    assert prepare("auto", problem(), device=device)() == "reference"
    assert asked == order


def test_problem_is_prepared_once_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    is_loaded(BACKENDS["native"].module)
    asked = stand_in(monkeypatch, "native", native.prepare, native.HONOURS)
    q = torch.randn(1, 2, 5, 4)
    for calls, backend in enumerate(("auto", "native"), start=1):
        attend(q, q, q, branches=(Window(2), TopK()), weights=torch.ones(1, 2, 5, 2), backend=backend)
        assert len(asked) == calls


@needs_native
def test_branches_are_classified_once_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    original = native.kind_of

    def counted(branch: Any, heads: int) -> Any:
        seen.append(branch)
        return original(branch, heads)

    monkeypatch.setattr(native, "kind_of", counted)
    # So many queries that the call is not remembered as one of its kind.
    q, branches = torch.randn(1, 2, 40, 4), (Window(2), TopK())
    attend(q, q, q, branches=branches, weights=torch.ones(1, 2, 40, 2))
    assert len(seen) == len(branches)
    assert all(one is other for one, other in zip(seen, branches, strict=True))


def test_what_was_prepared_can_run_again() -> None:
    run = prepare("auto", problem(), device="cpu")
    assert torch.equal(run().output, run().output)


@every_backend
def test_shortcuts_change_no_result(name: str) -> None:
    q: Tensor = torch.randn(1, 2, 12, 4)
    means = q.view(1, 2, 3, 4, 4).mean(dim=3)
    branch = TopK(scale=0.0, minimum=4, select="blocks", block=4)
    with torch.no_grad():
        if name == "flex":
            pytest.skip("compiles for half a minute; test_flex_compiled.py does")
        if name == "triton":
            pytest.skip("has no kernel that shortcuts are for")
        found, wanted = (
            attend(q, q, q, branches=branch, shortcuts=shortcuts, backend=name).output
            for shortcuts in (Shortcuts(block_means=means), None)
        )
    torch.testing.assert_close(found, wanted)


IMPORTS = """
import sys
import varifocal
heavy = ("varifocal.kernels.native.backend", "varifocal.kernels.flex.backend", "torch._dynamo", "transformers")
early = [name for name in heavy if name in sys.modules]
assert not early, early
import torch
q = torch.randn(1, 1, 3, 4)
varifocal.attend(q, q, q, branches=varifocal.Causal(), backend="reference")
assert not [name for name in heavy if name in sys.modules], "the reference loads no other backend"
varifocal.attend(q, q, q, branches=varifocal.Causal())
assert "varifocal.kernels.native.backend" in sys.modules
assert "varifocal.kernels.flex.backend" not in sys.modules, "auto on a cpu does not ask flex"
"""


def test_backends_are_imported_when_they_are_first_asked_for() -> None:
    ran = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == ""


@dataclass(frozen=True)
class EvenKeys(FixedBranch):
    """A branch of one's own, without a kernel."""

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        return (key % 2 == 0) | (key == query)


def test_reference_for_a_large_problem_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("varifocal.attention.backends.WARNED", set())
    monkeypatch.setattr("varifocal.attention.backends.MANY_PAIRS", 4 * 64 * 64)
    q, k = torch.randn(1, 4, 64, 8), torch.randn(1, 2, 64, 8)
    with pytest.warns(ReferenceWarning, match=r"writes out all 64 x 64 scores of 4 heads"):
        attend(q, k, k, branches=EvenKeys())
    # Warnings are errors in these tests: none the second time, for what is small, for a token alone, or by name.
    attend(q, k, k, branches=EvenKeys())
    monkeypatch.setattr("varifocal.attention.backends.WARNED", set())
    attend(q[:, :, :63], k[:, :, :63], k[:, :, :63], branches=EvenKeys())
    attend(q[:, :, -1:], k, k, branches=EvenKeys())
    attend(q, k, k, branches=EvenKeys(), backend="reference")
