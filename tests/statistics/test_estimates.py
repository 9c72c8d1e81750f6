"""Means, paired differences and their p-values."""

from __future__ import annotations

import pytest

from varifocal.statistics.estimates import estimate, holm, paired_difference


def test_interval_of_three_seeds_is_by_students_t() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert (found.mean, found.deviation) == (2.0, 1.0)
    assert found.half_width == pytest.approx(4.30265273 / 3**0.5)


def test_one_seed_has_no_interval() -> None:
    found = estimate([4.2])
    assert (found.deviation, found.half_width, found.interval) == (None, None, None)


def test_paired_difference_takes_out_what_seeds_share() -> None:
    # By hand: differences -0.1, -0.2, -0.3; mean -0.2, deviation 0.1, t = -0.2 / (0.1 / sqrt 3) = -3.4641.
    found = paired_difference([4.9, 5.8, 6.7], [5.0, 6.0, 7.0])
    assert found.mean == pytest.approx(-0.2)
    assert found.p_value == pytest.approx(0.0741799, rel=1e-5)
    assert not found.excludes_zero


def test_equal_differences_leave_nothing_to_chance() -> None:
    assert paired_difference([1.0, 2.0], [1.0, 2.0]).p_value == pytest.approx(1.0)
    assert paired_difference([2.0, 3.0], [1.0, 2.0]).p_value == 0.0


def test_one_pair_has_no_p_value() -> None:
    assert paired_difference([1.0], [2.0]).p_value is None


def test_interval_excludes_zero_exactly_when_p_is_below_5_percent() -> None:
    for shift in (0.05, 0.1, 0.2, 0.248, 0.249, 0.3):
        found = paired_difference([shift - 0.1, shift, shift + 0.1], [0.0, 0.0, 0.0])
        assert found.p_value is not None
        assert found.excludes_zero == (found.p_value < 0.05)


def test_holm_multiplies_the_smallest_by_their_number_and_keeps_the_order() -> None:
    assert holm([0.01, None, 0.04, 0.03]) == [pytest.approx(0.03), None, pytest.approx(0.06), pytest.approx(0.06)]


def test_holm_never_exceeds_1() -> None:
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_nothing_cannot_be_estimated() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        estimate([])
