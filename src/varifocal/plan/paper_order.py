"""Whether a prediction puts the rows of a paper's table into the paper's order, and which rows disagree."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from varifocal.results.papers import PaperTable

Quantity = Literal["memory", "speed"]
SAME = 0.01
"""Predictions that differ by less than this count as equal."""


@dataclass(frozen=True, kw_only=True)
class OrderRow:
    """A row of a paper's table as ratios to its baseline."""

    method: str
    mechanism: str
    paper: float
    predicted: float


@dataclass(frozen=True, kw_only=True)
class OrderCheck:
    """One column of a paper's table beside a prediction."""

    table: str
    quantity: Quantity
    rows: tuple[OrderRow, ...]

    @property
    def disagreements(self) -> tuple[str, ...]:
        """A sentence for each pair of rows that the prediction puts the other way round or cannot tell apart."""
        found = []
        more = "more memory" if self.quantity == "memory" else "faster"
        for one, two in itertools.combinations(self.rows, 2):
            first, second = (one, two) if one.paper > two.paper else (two, one)
            difference = first.predicted / second.predicted - 1
            names = f"{first.method} ({first.paper:.2f}x) against {second.method} ({second.paper:.2f}x)"
            numbers = f"{first.predicted:.2f}x and {second.predicted:.2f}x"
            if first.paper != second.paper and difference < -SAME:
                found.append(f"{more}: the paper has {names}, arithmetic says the reverse ({numbers})")
            elif first.paper != second.paper and difference < SAME:
                found.append(f"{more}: the paper has {names}, arithmetic sees no difference ({numbers})")
        return tuple(found)


def order_checks(table: PaperTable, predicted: Mapping[Quantity, Mapping[str, float]]) -> list[OrderCheck]:
    """Checks of a table's columns of memory and speed; `predicted` has both by mechanism. More hours are less speed."""
    columns: dict[Quantity, str | None] = {"memory": table.memory, "speed": table.speed or table.time}
    checks = []
    for quantity, column in columns.items():
        if column is None:
            continue
        values = {row.mechanism: row.number(column) for row in table.rows}
        base = table.rows[0].mechanism
        slower_is_more = quantity == "speed" and table.speed is None
        rows = []
        for row in table.rows:
            own, first = values[row.mechanism], values[base]
            assert own is not None
            assert first is not None
            rows.append(
                OrderRow(
                    method=row.method,
                    mechanism=row.mechanism,
                    paper=first / own if slower_is_more else own / first,
                    predicted=predicted[quantity][row.mechanism] / predicted[quantity][base],
                )
            )
        checks.append(OrderCheck(table=table.name, quantity=quantity, rows=tuple(rows)))
    return checks
