"""`varifocal bench data`: tokens a second on one core, beside a plain numpy memmap slice as the limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy
from numpy.typing import NDArray

from varifocal.bench.data.synthetic import write_synthetic
from varifocal.bench.timing import take_turns
from varifocal.data import Batches, PackedRows, PreparedData, TokenSplit
from varifocal.device import CPU
from varifocal.environment import environment
from varifocal.results.data_bench import DataBench, ReadData, ReadingRow

BASELINE = "numpy memmap slice"
AIM = 20e6
"""The tokens a second that one core should reach."""
BATCH_TOKENS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ReadingPlan:
    """What to measure."""

    lengths: tuple[int, ...] = (512, 2048, 8192)
    rounds: int = 5
    steps: int = 32
    """Batches that are read in one turn."""


def bench_data(data: PreparedData, plan: ReadingPlan) -> DataBench:
    """The result: a row for each way of reading and each row length."""
    split = data.split("train")
    rows = [row for length in plan.lengths for row in bench_length(split, length, plan)]
    return DataBench(
        environment=environment(),
        data=ReadData(
            documents=split.documents,
            tokens=split.tokens,
            token_bytes=data.manifest.token_bytes,
            source=data.manifest.source.get("source", data.manifest.source),
            fingerprint=data.fingerprint,
        ),
        baseline=BASELINE,
        aim=AIM,
        batch_tokens=BATCH_TOKENS,
        rows=tuple(rows),
    )


def bench_random_data(plan: ReadingPlan, *, tokens: int) -> DataBench:
    """The same on random tokens, in a folder that is removed afterwards."""
    with TemporaryDirectory() as folder:
        return bench_data(write_synthetic(Path(folder) / "data", tokens=tokens), plan)


def bench_length(split: TokenSplit, length: int, plan: ReadingPlan) -> list[ReadingRow]:
    """All ways of reading take turns on the same shuffled rows; ValueError if one of them reads something else."""
    packed, joined = split.rows(length=length), split.rows(length=length, joined=True)
    order = Batches(packed, batch_size=max(1, min(BATCH_TOKENS // length, len(packed))), epochs=None, seed=1)
    plain = plain_reader(split, length)
    for step in range(2):
        require_agreement(packed, joined, plain, order.indices(step))
    batches = [order.indices(step) for step in range(plan.steps)]
    tokens = sum(len(numbers) for numbers in batches) * length
    runs: dict[str, Callable[[], None]] = {
        BASELINE: reading(plain, batches),
        "joined rows": reading(joined.batch, batches),
        "packed rows": reading(packed.batch, batches),
        "shuffled batches": reading(order.at, range(plan.steps)),
    }
    times = take_turns(runs, rounds=plan.rounds, device=CPU)
    return [
        ReadingRow(
            name=name,
            length=length,
            tokens_per_second=tokens / times[name].median,
            ratio=times[BASELINE].speedup_of(times[name]),
            spread=times[name].spread,
            rounds=plan.rounds,
        )
        for name in runs
    ]


def reading(read: Callable[[Any], object], batches: Iterable[Any]) -> Callable[[], None]:
    """A run over all batches; each is dropped before the next is read, as in training."""

    def run() -> None:
        for batch in batches:
            read(batch)

    return run


def plain_reader(split: TokenSplit, length: int) -> Callable[[NDArray[numpy.int64]], NDArray[numpy.int64]]:
    """Reads slices of a memmap, widened to int64 [N, L], and does nothing else: no documents, positions or checks."""
    maps = [numpy.memmap(shard.file.path, dtype=shard.tokens.dtype, mode="r") for shard in split.shards]

    def read(numbers: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
        found = numpy.empty((len(numbers), length), dtype=numpy.int64)
        starts = numbers * length
        shards = split.token_offsets.searchsorted(starts, side="right") - 1
        for row, (number, start) in enumerate(zip(shards.tolist(), starts.tolist(), strict=True)):
            begin, filled = start - int(split.token_offsets[number]), 0
            while filled < length:
                part = maps[number][begin : begin + length - filled]
                found[row, filled : filled + len(part)] = part
                begin, number, filled = 0, number + 1, filled + len(part)
        return found

    return read


def require_agreement(
    packed: PackedRows,
    joined: PackedRows,
    plain: Callable[[NDArray[numpy.int64]], NDArray[numpy.int64]],
    numbers: NDArray[numpy.int64],
) -> None:
    """ValueError unless all ways read the same tokens, and documents end at their end tokens."""
    rows, wanted = packed.batch(numbers), plain(numbers)
    if not (numpy.array_equal(rows.input_ids, wanted) and numpy.array_equal(joined.batch(numbers).input_ids, wanted)):
        raise ValueError(
            "the rows differ from the tokens in the files, so nothing is timed; this is a bug in varifocal"
        )
    changes = numpy.diff(rows.documents, axis=1) != 0
    if not numpy.array_equal(changes, wanted[:, :-1] == packed.split.end):
        raise ValueError("documents do not end at their end tokens, so nothing is timed; this is a bug in varifocal")
