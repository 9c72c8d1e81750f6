"""How long a run trains: a clock of training alone, and the learning rate as a function of the share that is done."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from varifocal.training.config import OptimizationSection


class TrainingClock:
    """Seconds of training: by the clock on the wall, and of the processor. What lies between two starts is not counted.

    Processor seconds are those of all threads of this process, so that other work on the machine does not decide them.
    """

    def __init__(self, *, elapsed: float = 0.0, processor: float = 0.0, waits_for_gpu: bool = False) -> None:
        """Seconds so far. Beside a GPU the processor mostly waits, so that elapsed time stands for the processor's."""
        self.elapsed, self.processor = elapsed, processor
        self._read: Callable[[], float] = time.perf_counter if waits_for_gpu else time.process_time
        self.start()

    def start(self) -> None:
        """What went before is not training."""
        self._wall_mark, self._processor_mark = time.perf_counter(), self._read()

    def tick(self) -> None:
        """Count what passed since the last start or tick."""
        wall, processor = time.perf_counter(), self._read()
        self.elapsed += wall - self._wall_mark
        self.processor += processor - self._processor_mark
        self._wall_mark, self._processor_mark = wall, processor


def rate_factor(wanted: OptimizationSection, *, step: int, share: float) -> float:
    """The learning rate of the next step as a share of the largest one.

    f = r for a constant schedule and r (1 + cos(pi (s - w) / (1 - w))) / 2 for a cosine, where s is the share of the
    budget that is used, w the share of the warm-up and r = min(1, s / w) or min(1, steps / warm-up steps).

    Args:
        wanted: schedule and warm-up.
        step: steps that are done.
        share: of the budget in seconds.
    """
    share = min(1.0, share)
    rise, begin = 1.0, 0.0
    if wanted.warmup_share:
        rise, begin = min(1.0, share / wanted.warmup_share), wanted.warmup_share
    elif wanted.warmup_steps:
        rise = min(1.0, step / wanted.warmup_steps)
    if wanted.schedule == "constant" or share <= begin:
        return rise
    return rise * 0.5 * (1 + math.cos(math.pi * (share - begin) / (1 - begin)))
