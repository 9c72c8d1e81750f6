"""Student's t and the chi-squared distribution: how far the mean and the spread of a few seeds can be trusted."""

from __future__ import annotations

import math
from functools import cache

STEPS = 300
"""Steps of the continued fraction; a few dozen are enough for any number of seeds."""


def two_sided_p(t: float, degrees: int) -> float:
    """The probability that |T| >= |t| for T with v = `degrees` degrees of freedom: I(v / (v + t^2); v / 2, 1 / 2)."""
    if degrees < 1:
        raise ValueError(f"degrees of freedom must be at least 1, got {degrees}")
    if math.isinf(t):
        return 0.0
    return incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))


@cache
def critical_value(degrees: int, confidence: float = 0.95) -> float:
    """The t beyond which |T| lies with probability 1 - confidence."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    low, high = 0.0, 1.0
    while two_sided_p(high, degrees) > 1 - confidence:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, degrees) > 1 - confidence else (low, middle)
    return (low + high) / 2


def deviation_limit(deviation: float, degrees: int, confidence: float = 0.8) -> float:
    """A standard deviation that the true one exceeds with probability 1 - confidence: s sqrt(v / q).

    q is the chi-squared value with v = `degrees` degrees of freedom that is undercut with that probability.
    """
    if degrees < 1:
        raise ValueError(f"degrees of freedom must be at least 1, got {degrees}")
    low, high = 0.0, float(degrees)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if chi_squared(middle, degrees) > 1 - confidence else (middle, high)
    return deviation * math.sqrt(degrees / high)


def chi_squared(value: float, degrees: int) -> float:
    """The probability that a chi-squared number with v degrees of freedom is at most `value` (DLMF 8.7.1)."""
    half, x = degrees / 2, value / 2
    term = total = 1.0
    number = 1
    while term > 1e-16 * total:
        term *= x / (half + number)
        total += term
        number += 1
    return total * math.exp(half * math.log(x) - x - math.lgamma(half + 1)) if x else 0.0


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function I(x; a, b) for 0 <= x <= 1."""
    if not (a > 0 and b > 0 and 0 <= x <= 1):
        raise ValueError(f"I(x; a, b) needs a and b above 0 and x in 0 to 1, got x {x}, a {a}, b {b}")
    if x in (0.0, 1.0):
        return x
    # The fraction converges fast below the mean; above it, the mirror image does.
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(b, a, 1 - x)
    logarithm = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(logarithm) / (a * continued_fraction(a, b, x))


def continued_fraction(a: float, b: float, x: float) -> float:
    """1 + d1 / (1 + d2 / (1 + ...)) of the incomplete beta function (DLMF 8.17.22), by Lentz's method."""
    value, upper, lower = 1.0, 1.0, 0.0
    for step in range(1, STEPS):
        m = step // 2
        if step % 2:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        lower = 1 / away_from_zero(1 + d * lower)
        upper = away_from_zero(1 + d / upper)
        value *= upper * lower
        if abs(upper * lower - 1) < 1e-15:
            break
    return value


def away_from_zero(value: float) -> float:
    """The value, or a tiny number instead of 0, so that it can be divided by."""
    return value if value != 0 else 1e-300
