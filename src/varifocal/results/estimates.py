"""What a few seeds say, as files hold it: a mean with its interval, and a difference between paired runs."""

from __future__ import annotations

from dataclasses import dataclass

from varifocal.results.record import Record


@dataclass(frozen=True, kw_only=True)
class Estimate(Record):
    """A mean over seeds."""

    mean: float
    deviation: float | None
    """Standard deviation between seeds (n - 1 in its denominator); None for one seed."""
    half_width: float | None
    """Half the width of the 95 % interval by Student's t; None for one seed."""
    count: int

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval."""
        return None if self.half_width is None else (self.mean - self.half_width, self.mean + self.half_width)


@dataclass(frozen=True, kw_only=True)
class Difference(Estimate):
    """The mean over seeds of the difference between two runs of the same seed."""

    p_value: float | None
    """The p-value of the two-sided paired t test; None for one seed."""

    @property
    def excludes_zero(self) -> bool:
        """Whether the 95 % interval lies on one side of 0."""
        return self.half_width is not None and abs(self.mean) > self.half_width
