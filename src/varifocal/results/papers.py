"""The papers' own tables, as papers.toml quotes them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """A row of a paper's table."""

    mechanism: str
    """Our name for it: a mechanism, or an ablation of one."""
    method: str
    """The paper's name for it."""
    values: dict[str, str]
    """By column, as printed there."""

    def number(self, column: str | None) -> float | None:
        """The value of a column without its spread and unit; None if the table has no such column."""
        return None if column is None else float(self.values[column].split("±")[0].strip().removesuffix("x"))


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """A paper's table; its first row is the baseline."""

    name: str
    citation: str
    setting: dict[str, str]
    """What was trained, as far as the paper says."""
    columns: tuple[str, ...]
    loss: str
    """The column of the validation loss; the others likewise, if there is one."""
    memory: str | None = None
    speed: str | None = None
    time: str | None = None
    rows: tuple[PaperRow, ...]


@cache
def paper_tables() -> tuple[PaperTable, ...]:
    """All tables of the papers."""
    content = tomllib.loads(Path(__file__).with_name("papers.toml").read_text(encoding="utf-8"))
    return tuple(
        PaperTable(
            **(table | {
                "columns": tuple(table["columns"]),
                "rows": tuple(
                    PaperRow(
                        mechanism=row["mechanism"],
                        method=row["method"],
                        values=dict(zip(table["columns"], row["values"], strict=True)),
                    )
                    for row in table["rows"]
                ),
            })
        )
        for table in content["table"]
    )  # fmt: skip
