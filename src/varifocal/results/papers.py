"""The papers' own tables, as papers.toml quotes them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from varifocal.results.files import read_toml
from varifocal.results.record import Record


@dataclass(frozen=True, kw_only=True)
class PaperRow(Record):
    """A row of a paper's table."""

    mechanism: str
    """Our name for it: a mechanism, or an ablation of one."""
    method: str
    """The paper's name for it."""
    values: dict[str, str]
    """The values by column, as the paper prints them."""

    def number(self, column: str | None) -> float | None:
        """The value of a column without its spread and unit; None if the table has no such column."""
        return None if column is None else float(self.values[column].split("±")[0].strip().removesuffix("x"))


@dataclass(frozen=True, kw_only=True)
class PaperTable(Record):
    """A paper's table; its first row is the baseline."""

    name: str
    citation: str
    setting: dict[str, str]
    """What was trained, as far as the paper says."""
    columns: tuple[str, ...]
    loss: str
    """The column of the validation loss. The next three name those of memory, speed and time, if any."""
    memory: str | None = None
    speed: str | None = None
    time: str | None = None
    rows: tuple[PaperRow, ...]

    @property
    def own(self) -> str:
        """The mechanism that the paper proposes: the last of its table, but for what is taken away from it."""
        return [row.mechanism for row in self.rows if "." not in row.mechanism][-1]


@cache
def paper_tables() -> tuple[PaperTable, ...]:
    """All tables of the papers."""
    content = read_toml(Path(__file__).with_name("papers.toml"), what="the papers' tables")
    return tuple(PaperTable.from_json(table | {"rows": rows_by_column(table)}) for table in content["table"])


def rows_by_column(table: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a table with their values by column."""
    return [row | {"values": dict(zip(table["columns"], row["values"], strict=True))} for row in table["rows"]]
