"""From the values of a few seeds: a mean with its interval, and a difference between runs that share their seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from varifocal.results.estimates import Difference, Estimate
from varifocal.statistics.student import critical_value, two_sided_p


def estimate(values: Sequence[float]) -> Estimate:
    """Mean, spread and interval of the values, one for each seed."""
    if not values:
        raise ValueError("an estimate needs at least one value, got none")
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Estimate(mean=mean, deviation=None, half_width=None, count=1)
    deviation = statistics.stdev(values)
    half_width = critical_value(len(values) - 1) * deviation / math.sqrt(len(values))
    return Estimate(mean=mean, deviation=deviation, half_width=half_width, count=len(values))


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """ours - theirs, seed by seed: what both runs share (data order, initial weights) cancels out."""
    found = estimate([a - b for a, b in zip(ours, theirs, strict=True)])
    p_value = None
    if found.deviation is not None:
        error = found.deviation / math.sqrt(found.count)
        # If all differences are equal, nothing is left to chance: all 0 means no difference, anything else is one.
        t = found.mean / error if error else math.inf if found.mean else 0.0
        p_value = two_sided_p(t, found.count - 1)
    return Difference(
        mean=found.mean, deviation=found.deviation, half_width=found.half_width, count=found.count, p_value=p_value
    )


POWER = 0.8416
"""Standard deviations above the critical value that make a difference show in four of five repetitions."""
MOST_SEEDS = 1000


def seeds_needed(mean: float, deviation: float, *, comparisons: int = 1) -> int | None:
    """How many pairs would show a difference of this mean and deviation in four of five repetitions.

    None for more than a thousand. The mean of a few pairs is itself uncertain, and so is this number.

    Args:
        mean: of the difference.
        deviation: of the difference between pairs.
        comparisons: how many differences are asked for at once; each then has to reach 0.05 / comparisons.
    """
    for count in range(2, MOST_SEEDS + 1):
        if abs(mean) >= least_difference(count, deviation, comparisons=comparisons):
            return count
    return None


def least_difference(count: int, deviation: float, *, comparisons: int = 1) -> float:
    """The smallest mean of `count` pairs of this deviation that would show in four of five repetitions."""
    if count < 2:
        return math.inf
    return deviation * (critical_value(count - 1, 1 - 0.05 / comparisons) + POWER) / math.sqrt(count)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """The p-values after Holm's correction for asking several questions at once; None stays None."""
    known = sorted((p, number) for number, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    least = 0.0
    for rank, (p, number) in enumerate(known):
        least = max(least, min(1.0, p * (len(known) - rank)))
        adjusted[number] = least
    return adjusted
