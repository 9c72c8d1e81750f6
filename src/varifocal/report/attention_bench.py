"""The result of `varifocal bench attention` as tables."""

from __future__ import annotations

import math

from varifocal.report.table import Table
from varifocal.results.attention_bench import AttentionBench


def growth(points: list[tuple[int, float]]) -> float | None:
    """The exponent of n between the first and the last of the points (n, value); None for fewer than two."""
    if len(points) < 2:
        return None
    (first, one), (last, other) = points[0], points[-1]
    return math.log(other / one) / math.log(last / first)


def growth_of_time(bench: AttentionBench, name: str, kind: str, *, least: int = 4096) -> float | None:
    """The exponent of n in a contender's seconds between the first length that is at least `least` and the last."""
    rows = [bench.row(name, kind, length) for length in bench.lengths(kind) if length >= least]
    return growth([(row.length, row.seconds) for row in rows if row is not None])


def speedup_table(bench: AttentionBench, kind: str) -> Table:
    """Header and rows: the speed of each contender relative to the baseline, by length, and its growth."""
    lengths = bench.lengths(kind)
    header = ["n =", *(str(length) for length in lengths), "growth"]
    least = min(4096, lengths[0] if len(lengths) < 2 else lengths[-2])
    body = []
    for name in bench.names(kind):
        cells = [f"{row.speedup:.2f}x" if (row := bench.row(name, kind, n)) else "" for n in lengths]
        body.append([name, *cells, power(growth_of_time(bench, name, kind, least=least))])
    return [header, *body]


def memory_table(bench: AttentionBench, kind: str) -> Table:
    """Header and rows: peak additional memory in MB, and relative to the baseline."""
    lengths = sorted({row.length for row in bench.of(kind) if row.peak_bytes is not None})
    body = []
    for name in bench.names(kind):
        rows = [bench.row(name, kind, length) for length in lengths]
        cells = [
            f"{row.peak_bytes / 1e6:.0f} ({row.memory_ratio or 0:.2f}x)" if row and row.peak_bytes is not None else ""
            for row in rows
        ]
        taken = [(row.length, float(row.peak_bytes)) for row in rows[-2:] if row and row.peak_bytes]
        if any(cells):
            body.append([name, *cells, power(growth(taken))])
    return [["n =", *(str(length) for length in lengths), "growth"], *body]


def power(exponent: float | None) -> str:
    """n^1.50."""
    return "" if exponent is None else f"n^{exponent:.2f}"
