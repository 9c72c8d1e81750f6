"""Tables of text cells, a header and rows, which the terminal, Markdown pages and the report print."""

from __future__ import annotations

Table = list[list[str]]


def markdown(table: Table) -> str:
    """A table as Markdown."""
    header, *body = table
    lines = [f"| {' | '.join(header)} |", "| --- |" + " ---: |" * (len(header) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in body)])


def without_empty_columns(table: Table) -> Table:
    """The table without columns that are empty in every row, such as p for one seed."""
    header, *body = table
    kept = [number for number in range(len(header)) if number == 0 or any(row[number] for row in body)]
    return [[row[number] for number in kept] for row in table]


def number(value: float | None, form: str) -> str:
    """The number in that format, or an empty text for None."""
    return "" if value is None else format(value, form)


def ratio(value: float | None) -> str:
    """1.05x."""
    return "" if value is None else f"{value:.2f}x"


def p_text(p_value: float | None) -> str:
    """A p-value with three decimals, or <0.001."""
    return "" if p_value is None else f"{p_value:.3f}" if p_value >= 0.001 else "<0.001"
