"""varifocal data inspect: what a data set holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from varifocal.cli.data_tables import print_splits, require_packages
from varifocal.cli.options import MOST_SEED, Plot, require_plots
from varifocal.cli.tables import print_table
from varifocal.data import open_data
from varifocal.report.data_report import histogram, length_table
from varifocal.results.data_report import DataReport
from varifocal.results.files import require_folder

ReportFile = Annotated[Path | None, typer.Option("--json", help="Also write the report to this file.", dir_okay=False)]


def inspect(
    folder: Annotated[Path, typer.Argument(metavar="DATA", help="A prepared data set.", show_default=False)],
    window: Annotated[
        int, typer.Option(min=1, help="Keys that a window would hold; the report counts what is longer.")
    ] = 512,
    samples: Annotated[int, typer.Option(min=0, help="Documents to show.")] = 3,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Another seed shows other documents.")] = 0,
    verify: Annotated[bool, typer.Option("--verify", help="Verify every byte first, however large the data.")] = False,
    json_file: ReportFile = None,
    plot: Plot = None,
) -> None:
    """Show what a data set holds: lengths, bytes per token, what lies beyond a window, a few documents.

    The shares of documents longer than the window, and of tokens that lie beyond it, bound what attention to the whole
    text can gain.

    [bold]Examples[/bold]

      varifocal data inspect data/sotu --window 256

      varifocal data inspect data/sotu --samples 0 --plot lengths.png --json lengths.json
    """
    require_packages()
    from varifocal.data.inspect import inspect_data

    require_folder(json_file)
    require_folder(plot)
    require_plots(plot)
    prepared = open_data(folder, verify="full" if verify else "auto")
    report = DataReport.from_json(inspect_data(prepared, window=window, samples=samples, seed=seed))
    console = Console()
    print_splits(console, prepared)
    print_report(console, report)
    if json_file is not None:
        report.write(json_file)
    if plot is not None:
        from varifocal.report.data_report_plot import plot_data_report

        plot_data_report(report, plot)


def print_report(console: Console, report: DataReport) -> None:
    """Print the lengths of each split, a histogram of the first, and samples."""
    print_table(console, None, length_table(report))
    name, (header, *body) = histogram(report)
    table = Table(title=f"length of documents in {name}", box=None, pad_edge=False, title_justify="left")
    for heading in header:
        table.add_column(heading, justify="right" if heading else "left")
    for row in body:
        table.add_row(*row)
    console.print(table)
    for sample in report.samples:
        console.print(
            f"\n[bold]document {sample.document} of {sample.split}[/bold], {sample.tokens:,} tokens, "
            f"{sample.bytes:,} bytes",
            highlight=False,
        )
        console.print(escape(sample.text), highlight=False)
