"""Tables of texts: a header and rows, as the terminal, a page of Markdown and the report print them."""

from __future__ import annotations

Table = list[list[str]]


def markdown(table: Table) -> str:
    """A table as Markdown."""
    header, *body = table
    lines = [f"| {' | '.join(header)} |", "| --- |" + " ---: |" * (len(header) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in body)])


def without_empty_columns(table: Table) -> Table:
    """The table without columns that no row fills, such as p for one seed."""
    header, *body = table
    kept = [number for number in range(len(header)) if number == 0 or any(row[number] for row in body)]
    return [[row[number] for number in kept] for row in table]


def number(value: float | None, form: str) -> str:
    """The number, or nothing."""
    return "" if value is None else format(value, form)


def ratio(value: float | None) -> str:
    """1.05x."""
    return "" if value is None else f"{value:.2f}x"


def p_text(p_value: float | None) -> str:
    """Three decimals, or that it is smaller."""
    return "" if p_value is None else f"{p_value:.3f}" if p_value >= 0.001 else "<0.001"
