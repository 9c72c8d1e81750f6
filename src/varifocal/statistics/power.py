"""What a comparison will be able to tell, from the paired spread of a pilot."""

from __future__ import annotations

from collections.abc import Sequence

from varifocal.results.pilot import Pilot, SeedsNeeded
from varifocal.statistics.estimates import least_difference, seeds_needed

EFFECTS = (0.1, 0.05, 0.02, 0.01, 0.005)
"""Effects in nats a token for which seeds are counted."""


def needed_seeds(effects: Sequence[float], *, spread: float, limit: float, comparisons: int) -> tuple[SeedsNeeded, ...]:
    """For each effect the seeds it needs at the measured spread, and at its limit."""
    return tuple(
        SeedsNeeded(
            effect=effect,
            seeds=seeds_needed(effect, spread, comparisons=comparisons),
            at_limit=seeds_needed(effect, limit, comparisons=comparisons),
        )
        for effect in effects
    )


def can_tell(pilot: Pilot, *, seeds: int, differences: int, limit: bool = False) -> float:
    """The smallest difference that so many seeds show in four of five repetitions; infinite for one seed."""
    spread = pilot.spread_limit if limit else pilot.difference.deviation
    assert spread is not None
    return least_difference(seeds, spread, comparisons=differences)
