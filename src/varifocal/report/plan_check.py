"""The result of `varifocal bench plan` as tables: how far predictions are from what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from varifocal.report.table import Table, number
from varifocal.results.plan_check import PlanCheck, PlanRow


@dataclass(frozen=True)
class Errors:
    """The relative errors of the predictions of one quantity, predicted / measured - 1."""

    median: float
    """The median of their absolute values."""
    worst: float
    """The largest, with its sign."""
    count: int


def time_error(row: PlanRow) -> float:
    """The relative error of the seconds."""
    return row.predicted_seconds / row.seconds - 1


def memory_error(row: PlanRow) -> float | None:
    """The relative error of the bytes; None if they were not measured."""
    return None if row.peak_bytes is None else row.predicted_bytes / row.peak_bytes - 1


def summed_up(errors: Sequence[float | None]) -> Errors | None:
    """Median and worst of the known errors; None if no error is known."""
    found = [one for one in errors if one is not None]
    return Errors(statistics.median(map(abs, found)), max(found, key=abs), len(found)) if found else None


def plan_table(check: PlanCheck) -> Table:
    """Header and rows: measured and predicted time and memory of each step."""
    table = [["preset, mechanism", "tokens", "s measured", "predicted", "error", "MB measured", "predicted", "error"]]
    for row in check.rows:
        table.append([
            f"{row.preset} {row.name}",
            str(row.length),
            f"{row.seconds:.3g}",
            f"{row.predicted_seconds:.3g}",
            f"{time_error(row):+.0%}",
            number(None if row.peak_bytes is None else row.peak_bytes / 1e6, ",.0f"),
            f"{row.predicted_bytes / 1e6:,.0f}",
            number(memory_error(row), "+.0%"),
        ])  # fmt: skip
    return table


def error_table(check: PlanCheck) -> Table:
    """Header and rows: median and worst error of time and memory, for each preset and for all together."""
    table = [["", "time: median", "worst", "memory: median", "worst"]]
    presets = dict.fromkeys(row.preset for row in check.rows)
    groups = {name: [row for row in check.rows if row.preset == name] for name in presets}
    for name, rows in (groups | {"all": list(check.rows)}).items():
        cells = [name]
        for found in (summed_up([time_error(row) for row in rows]), summed_up([memory_error(row) for row in rows])):
            cells += ["", ""] if found is None else [f"{found.median:.0%}", f"{found.worst:+.0%}"]
        table.append(cells)
    return table
