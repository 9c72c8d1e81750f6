"""Batches in a fixed order: by seed and epoch, shared among ranks, from any step on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

import numpy
from numpy.typing import NDArray

from varifocal.data.order import stretch
from varifocal.data.packing import PackedRows, Rows


@dataclass(frozen=True)
class Batches:
    """Step s of rank r reads `batch_size` rows that no other step of the epoch and no other rank reads.

    Steps count on through the epochs, and every step can be computed by itself: to resume, say `start_step`. All ranks
    together read the same rows in a step however many they are, as long as batch_size * world_size is the same.
    """

    rows: PackedRows
    _: KW_ONLY
    batch_size: int
    """Rows of this rank in a step."""
    seed: int = 0
    epochs: int | None = 1
    """How often to go through the rows; None for ever."""
    start_step: int = 0
    rank: int = 0
    world_size: int = 1
    shuffle: bool = True
    """Another order in every epoch; otherwise the order of the rows."""
    drop_last: bool = True
    """Leave out the rows that do not fill a step of all ranks; otherwise some ranks get fewer, perhaps none."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be between 0 and {self.world_size - 1}, got {self.rank}")
        if self.start_step < 0 or self.seed < 0 or (self.epochs is not None and self.epochs < 1):
            raise ValueError(
                f"start_step and seed must be at least 0 and epochs at least 1, got {self.start_step}, {self.seed} and "
                f"{self.epochs}"
            )
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"{len(self.rows)} rows do not fill one step of {self.world_size} ranks with {self.batch_size} rows "
                "each; use smaller batches, shorter rows or drop_last=False"
            )

    @property
    def steps_per_epoch(self) -> int:
        together = self.batch_size * self.world_size
        return len(self.rows) // together if self.drop_last else -(-len(self.rows) // together)

    @property
    def steps(self) -> int | None:
        """The number of steps in all epochs; None if there is no end."""
        return None if self.epochs is None else self.epochs * self.steps_per_epoch

    def indices(self, step: int) -> NDArray[numpy.int64]:
        """The numbers of the rows that this rank reads in a step."""
        if step < 0 or (self.steps is not None and step >= self.steps):
            below = "" if self.steps is None else f" and below {self.steps}"
            raise IndexError(f"step must be at least 0{below}, got {step}")
        epoch, within = divmod(step, self.steps_per_epoch)
        begin = (within * self.world_size + self.rank) * self.batch_size
        begin, end = min(begin, len(self.rows)), min(begin + self.batch_size, len(self.rows))
        if not self.shuffle:
            return numpy.arange(begin, end, dtype=numpy.int64)
        return stretch(begin, end, count=len(self.rows), seed=self.seed, epoch=epoch)

    def at(self, step: int) -> Rows:
        """The rows of a step."""
        return self.rows.batch(self.indices(step))

    def __len__(self) -> int:
        """The steps from `start_step` to the end."""
        if self.steps is None:
            raise TypeError("batches without an end have no length; set epochs")
        return max(0, self.steps - self.start_step)

    def __iter__(self) -> Iterator[Rows]:
        step = self.start_step
        while self.steps is None or step < self.steps:
            yield self.at(step)
            step += 1
