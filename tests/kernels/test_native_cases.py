"""The native backend over the one table of cases, on every target that this machine can run."""

from __future__ import annotations

import pytest
import torch

from tests.cases import CASES, Case
from tests.kernels.accuracy import results, worst_errors
from varifocal import conformance
from varifocal.attention.backends import BACKENDS, UnavailableError
from varifocal.kernels.native import library

pytestmark = pytest.mark.skipif(library.why_missing() is not None, reason="the native library was not built")
TARGETS = [] if library.why_missing() is not None else list(library.targets())


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("VARIFOCAL_TARGET", request.param)
    return str(request.param)


def served(case: Case) -> bool:
    """Whether the native backend has kernels for a case."""
    try:
        case.make(torch.float32, 0).attend("native")
    except UnavailableError:
        return False
    return True


SERVED = [case for case in CASES if TARGETS and served(case)]


def test_most_of_the_table_is_served() -> None:
    # What is left out: unions with a top-k, segments with a window, pair gates over a top-k.
    assert len(SERVED) > 0.95 * len(CASES)


@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_output_and_gradients_are_as_accurate_as_the_reference(case: Case, target: str) -> None:
    worst, allowed = worst_errors(case, "native", torch.float32)
    assert {name: error for name, error in worst.items() if error > allowed[name]} == {}


@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_bfloat16_loses_only_the_rounding_of_inputs_and_results(case: Case) -> None:
    worst, allowed = worst_errors(case, "native", torch.bfloat16)
    assert {name: error for name, error in worst.items() if error > allowed[name]} == {}


@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_results_do_not_depend_on_the_number_of_threads(case: Case) -> None:
    inputs = case.make(torch.float32, 0)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = results(inputs, "native")
        torch.set_num_threads(3)
        together = results(inputs, "native")
    finally:
        torch.set_num_threads(before)
    assert {name for name in alone if not torch.equal(alone[name], together[name])} == set()


@pytest.mark.parametrize("name", conformance.every_variant())
def test_mechanism_keeps_its_promises_on_the_native_backend(name: str, target: str) -> None:
    conformance.assert_conforms(name, backend="native", dtype=torch.float32)


def test_auto_prefers_the_native_backend() -> None:
    assert next(iter(BACKENDS)) == "native"


def test_named_backend_says_why_it_cannot_run() -> None:
    case = next(case for case in CASES if case.name == "segments_with_window")
    with pytest.raises(UnavailableError, match=r"backend 'native' has no kernel for the branch .*; use backend='auto'"):
        case.make(torch.float32, 0).attend("native")
    with pytest.raises(UnavailableError, match=r"backend 'native' runs float32 and bfloat16, got torch\.float64"):
        CASES[0].make(torch.float64, 0).attend("native")
