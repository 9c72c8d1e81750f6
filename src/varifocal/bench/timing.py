"""Times that can be compared: all variants take turns in one process, so that what disturbs one disturbs all."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from varifocal.device import Device


@dataclass(frozen=True)
class Times:
    """The seconds that one variant took in each round, in the order of the rounds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to the median; 0 for fewer than three repeats."""
        if len(self.seconds) < 3:
            return 0.0
        first, _, third = statistics.quantiles(self.seconds, n=4)
        return (third - first) / 2 / self.median

    def speedup_of(self, other: Times) -> float:
        """How many times as fast `other` is: the median over rounds of the ratio within a round."""
        return statistics.median(own / its for own, its in zip(self.seconds, other.seconds, strict=True))


def take_turns(
    runs: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    device: Device,
    warm_up: bool = True,
) -> dict[str, Times]:
    """Run every variant once to warm up (unless that was done before), then `rounds` times in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for name, number in turns(tuple(runs), rounds):
        if number == 0 and not warm_up:
            continue
        elapsed = device.seconds(runs[name])
        if number > 0:
            seconds[name].append(elapsed)
    return {name: Times(tuple(values)) for name, values in seconds.items()}


def turns(names: tuple[str, ...], rounds: int) -> Iterator[tuple[str, int]]:
    """Every name in every round; round 0 is the warm-up, and every other round goes backwards."""
    for number in range(rounds + 1):
        for name in names if number % 2 == 0 else reversed(names):
            yield name, number
