"""Student's t distribution against values that any table of it holds."""

from __future__ import annotations

import math

import pytest

from varifocal.statistics.student import critical_value, incomplete_beta, two_sided_p


@pytest.mark.parametrize(
    ("degrees", "confidence", "value"),
    [
        (1, 0.95, 12.7062047364),
        (2, 0.95, 4.30265272991),
        (4, 0.95, 2.77644510520),
        (9, 0.95, 2.26215716280),
        (30, 0.95, 2.04227245630),
        (2, 0.99, 9.92484320092),
        (5, 0.90, 2.01504837333),
        (1000, 0.95, 1.96233908082),
    ],
)
def test_critical_values_are_those_of_the_tables(degrees: int, confidence: float, value: float) -> None:
    assert critical_value(degrees, confidence) == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("t", [0.0, 0.1, 1.0, 3.0, 50.0, 1e6])
def test_one_degree_of_freedom_is_the_cauchy_distribution(t: float) -> None:
    assert two_sided_p(t, 1) == pytest.approx(2 / math.pi * math.atan2(1, t), rel=1e-12)


@pytest.mark.parametrize("t", [0.0, 0.3, 2.0, 9.0])
def test_two_degrees_of_freedom_have_a_closed_form(t: float) -> None:
    assert two_sided_p(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-10)


def test_many_degrees_of_freedom_are_nearly_normal() -> None:
    assert two_sided_p(1.5, 10_000_000) == pytest.approx(math.erfc(1.5 / math.sqrt(2)), rel=1e-6)


def test_sign_of_t_does_not_matter_and_infinity_is_certain() -> None:
    assert two_sided_p(-2.5, 4) == two_sided_p(2.5, 4)
    assert two_sided_p(math.inf, 4) == 0.0


@pytest.mark.parametrize(("a", "b"), [(0.5, 0.5), (2, 3), (7.5, 0.5), (40, 60)])
def test_incomplete_beta_is_its_own_mirror_image(a: float, b: float) -> None:
    for x in (0.0, 0.01, 0.3, 0.5, 0.77, 1.0):
        assert incomplete_beta(a, b, x) + incomplete_beta(b, a, 1 - x) == pytest.approx(1.0, abs=1e-13)


def test_incomplete_beta_of_whole_numbers_is_a_sum_of_binomials() -> None:
    direct = sum(math.comb(9, k) * 0.37**k * 0.63 ** (9 - k) for k in range(4, 10))
    assert incomplete_beta(4, 6, 0.37) == pytest.approx(direct, rel=1e-12)


def test_no_degrees_of_freedom_are_refused() -> None:
    with pytest.raises(ValueError, match="degrees of freedom must be at least 1, got 0"):
        two_sided_p(1.0, 0)
