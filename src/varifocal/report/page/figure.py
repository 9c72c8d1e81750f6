"""A figure of the page: a picture, the same in words, its numbers, and the command that made them."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from urllib.parse import quote

Cell = str | int | float | None


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure."""

    name: str
    """The name of the file with its numbers."""
    title: str
    svg: str
    """As `drawing.finished` returns it."""
    words: str
    """What it shows, in a sentence below it."""
    numbers: str = ""
    """What its lines end at, for those who hear the page: a table tells those who see it."""
    header: tuple[str, ...]
    rows: list[list[Cell]]
    command: str
    """What made the numbers."""

    def csv(self) -> str:
        """The numbers as CSV."""
        content = io.StringIO()
        writer = csv.writer(content, lineterminator="\n")
        writer.writerow(self.header)
        writer.writerows([[as_text(cell) for cell in row] for row in self.rows])
        return content.getvalue()

    def link(self) -> str:
        """The CSV as a data: address for a link."""
        return "data:text/csv;charset=utf-8," + quote(self.csv())


def as_text(cell: Cell) -> Cell:
    """The cell; a text that a spreadsheet would run as a formula gets an apostrophe in front."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t") else cell
