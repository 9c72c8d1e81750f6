"""Result tables in the terminal, and the progress bars that are shown while the results are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


def progress_bar() -> Progress:
    """A bar that shows what is being done and for how long; it disappears at the end."""
    return Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), transient=True)


def counting_bar(unit: str = "", *, console: Console | None = None) -> Progress:
    """The same bar with a count of what is done; `console` is where other output is printed meanwhile."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    words = [TextColumn(unit)] if unit else []
    return Progress(*columns, *words, TimeElapsedColumn(), console=console, transient=True)


@contextmanager
def shown_count(doing: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for one thing; what it yields is called with how much is done, and how much there is."""
    with shown_steps(doing) as show:
        yield lambda done, total: show(doing, done, total)


@contextmanager
def shown_steps(first: str = "starting") -> Iterator[Callable[..., None]]:
    """A bar for several things; what it yields is called with what is being done, and how much of how much."""
    with progress_bar() as bar:
        task = bar.add_task(first, total=None)

        def show(doing: str, done: int | None = None, total: int | None = None) -> None:
            bar.update(task, description=doing, completed=done, total=total)

        yield show


def print_table(console: Console, title: str | None, rows: list[list[str]]) -> None:
    """Print a table with its first column aligned left and the others, which hold numbers, aligned right."""
    header, *body = rows
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in body:
        table.add_row(*row)
    # A line that the terminal breaks can still be read; a number that is cut off cannot.
    before = console.width
    console.width = max(before, console.measure(table, options=console.options.update(max_width=1000)).maximum)
    console.print(table)
    console.width = before


def send_back(line: str) -> None:
    """Print the one line that is asked of whoever has a GPU: none of ours has ever run on one."""
    console = Console()
    console.print("\nPlease send this line back; docs/backends.md says what is known without it:", highlight=False)
    # Not broken by the terminal: it is to be copied.
    console.print(line, highlight=False, markup=False, soft_wrap=True)
