"""What the machine's memory gives to a plain loop: the measure of decoding, which reads every weight once a token."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from varifocal.kernels.native import library
from varifocal.kernels.steps.few_rows import linear_of_few

COLUMNS = 4096
TRIALS = 3


class MemoryReader:
    """Reads a buffer that no cache holds, from one end to the other, in the fastest of a few ways."""

    def __init__(self, size: int = 512 << 20) -> None:
        self.buffer = torch.ones(size // (4 * COLUMNS), COLUMNS)
        self.vector = torch.ones(1, COLUMNS)
        ways = [self.by_sum] + ([self.by_product] if library.why_missing() is None else [])
        self.read = min(ways, key=lambda way: min(seconds_of(way) for _ in range(TRIALS)))

    @property
    def bytes(self) -> int:
        return self.buffer.numel() * self.buffer.element_size()

    def by_sum(self) -> Tensor:
        return self.buffer.sum()

    def by_product(self) -> Tensor:
        return linear_of_few(self.vector, self.buffer)

    def seconds(self) -> float:
        """The time of one reading."""
        return seconds_of(self.read)


def seconds_of(run: Callable[[], object]) -> float:
    """The time of one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
