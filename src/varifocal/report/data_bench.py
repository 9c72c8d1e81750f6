"""The result of `varifocal bench data` as a table."""

from __future__ import annotations

from varifocal.report.table import Table
from varifocal.results.data_bench import DataBench


def reading_table(bench: DataBench) -> Table:
    """Header and rows: millions of tokens a second for each row length, and the ratio to the limit."""
    lengths = sorted({row.length for row in bench.rows})
    found = {(row.name, row.length): f"{row.tokens_per_second / 1e6:.0f} ({row.ratio:.2f}x)" for row in bench.rows}
    names = dict.fromkeys(row.name for row in bench.rows)
    body = [[name, *(found.get((name, length), "") for length in lengths)] for name in names]
    return [["", *(f"rows of {length}" for length in lengths)], *body]
