"""The result file of `varifocal bench plan`, read for tables: how far predictions are from what was measured."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from varifocal.results.result_file import read_result

Quantity = Literal["seconds", "bytes"]
MEASURED = {"seconds": "seconds", "bytes": "peak_bytes"}


@dataclass(frozen=True)
class Errors:
    """Of one quantity: relative errors of predictions, as predicted / measured - 1."""

    median: float
    """Of their sizes."""
    worst: float
    """The largest, with its sign."""
    count: int


def read_plan_check(path: Path) -> dict[str, Any]:
    """ValueError unless the file is a result of `varifocal bench plan`."""
    return read_result(path, key="benchmark", kind="plan", command="varifocal bench plan")


def error_of(row: dict[str, Any], quantity: Quantity) -> float | None:
    """predicted / measured - 1; None where nothing was measured."""
    measured = row[MEASURED[quantity]]
    return None if measured is None else float(row[f"predicted_{quantity}"] / measured - 1)


def errors(rows: list[dict[str, Any]], quantity: Quantity) -> Errors | None:
    """Median and worst over those rows that were measured; None if none was."""
    found = [one for row in rows if (one := error_of(row, quantity)) is not None]
    if not found:
        return None
    return Errors(statistics.median(map(abs, found)), max(found, key=abs), len(found))


def plan_table(content: dict[str, Any]) -> list[list[str]]:
    """Header and rows: measured and predicted time and memory of each step."""
    table = [["preset, mechanism", "tokens", "s measured", "predicted", "error", "MB measured", "predicted", "error"]]
    for row in content["rows"]:
        cells = [f"{row['preset']} {row['name']}", str(row["length"])]
        cells += [f"{row['seconds']:.3g}", f"{row['predicted_seconds']:.3g}", f"{error_of(row, 'seconds'):+.0%}"]
        known = row["peak_bytes"] is not None
        cells += [
            f"{row['peak_bytes'] / 1e6:,.0f}" if known else "",
            f"{row['predicted_bytes'] / 1e6:,.0f}",
            f"{error_of(row, 'bytes'):+.0%}" if known else "",
        ]
        table.append(cells)
    return table


def error_table(content: dict[str, Any]) -> list[list[str]]:
    """Header and rows: median and worst error of time and memory, by preset and of all."""
    table = [["", "time: median", "worst", "memory: median", "worst"]]
    rows = content["rows"]
    groups = {name: [row for row in rows if row["preset"] == name] for name in dict.fromkeys(r["preset"] for r in rows)}
    for name, group in (groups | {"all": rows}).items():
        cells = [name]
        for quantity in ("seconds", "bytes"):
            found = errors(group, quantity)
            cells += ["", ""] if found is None else [f"{found.median:.0%}", f"{found.worst:+.0%}"]
        table.append(cells)
    return table
