"""varifocal check: the conformance table in the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from string import ascii_lowercase
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from varifocal import MECHANISMS
from varifocal.cli.options import MOST_SEED
from varifocal.cli.tables import counting_bar, send_back
from varifocal.conformance import ROWS, Conformance, subjects_of
from varifocal.conformance import check as check_conformance
from varifocal.device import find_device, find_dtype
from varifocal.environment import place_and_versions
from varifocal.report.from_gpus import check_line
from varifocal.results.conformance import ConformanceRecord, FindingRecord, write_conformance
from varifocal.results.files import require_folder

MARKS = {"kept": "[green]✓[/green]", "broken": "[bold red]✗[/bold red]", "not offered": "[dim]·[/dim]"}
PLAIN_MARKS = {"kept": "[green]+[/green]", "broken": "[bold red]x[/bold red]", "not offered": "[dim].[/dim]"}
"""For where those cannot be shown: both would become a question mark."""
Mechanisms = Annotated[
    list[str] | None,
    typer.Option(
        "--mechanism",
        "-m",
        help="A mechanism or variant to check, or module:name of a function, a class or a mechanism of your own; "
        "repeat for several. Default: all.",
    ),
]
RowNames = Annotated[
    list[str] | None, typer.Option("--row", "-r", help="A row of the table; repeat for several. Default: all.")
]
FindingsFile = Annotated[
    Path | None, typer.Option("--json", help="Also write the findings to this file.", dir_okay=False)
]


def check(
    mechanism: Mechanisms = None,
    row: RowNames = None,
    backend: Annotated[str, typer.Option(help="auto, or the name of a backend.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float64, float32, bfloat16 or float16.")] = "float64",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    heads: Annotated[int, typer.Option(min=1, help="Query heads of the test inputs.")] = 4,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key and value heads of the test inputs.")] = 2,
    head_width: Annotated[int, typer.Option(min=1, help="Width of a head.")] = 8,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Another seed draws other inputs.")] = 0,
    json_file: FindingsFile = None,
) -> None:
    """Test that each mechanism does what training and decoding rely on, and print the table.

    A text must give the same outputs and gradients whole, as a prefix, in chunks, token by token, packed with others,
    after padding and in any batch; a later token must change nothing at all. The exit code is 1 if a promise is broken.

    \b
    varifocal check
    varifocal check -m head_gated --backend native --dtype float32
    varifocal check --device cuda
    varifocal check -m my_package.attention:my_attention
    """
    kind, place = find_dtype(dtype), find_device(device).place
    require_folder(json_file)
    # As `python -m` does: what lies in the present folder can be named.
    sys.path.insert(0, "")
    subjects = [subject for wanted in mechanism or MECHANISMS for subject in subjects_of(wanted)]
    results = []
    with counting_bar() as bar:
        task = bar.add_task("", total=len(subjects))
        for subject in subjects:
            bar.update(task, description=getattr(subject, "__name__", str(subject)))
            found = check_conformance(
                subject, rows=row, backend=backend, dtype=kind, device=place, heads=heads, kv_heads=kv_heads,
                head_width=head_width, seed=seed,
            )  # fmt: skip
            results.append(found)
            bar.advance(task)
    print_findings(Console(), results, title=f"conformance of backend {backend}, {dtype}, {device}")
    records = [record_of(result) for result in results]
    if place.type != "cpu":
        send_back(check_line(records, where=place_and_versions(place), backend=backend, dtype=dtype))
    if json_file is not None:
        write_conformance(json_file, records)
    if not all(result.conforms for result in results):
        raise typer.Exit(1)


def print_findings(console: Console, results: list[Conformance], *, title: str) -> None:
    """Print the table, what its columns promise, and a sentence for every broken promise."""
    marks_of = PLAIN_MARKS if console.options.ascii_only else MARKS
    shown = {finding.row.name for result in results for finding in result.findings}
    rows = [row for row in ROWS if row.name in shown]
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("mechanism", no_wrap=True)
    for letter, _ in zip(ascii_lowercase, rows, strict=False):
        table.add_column(letter, justify="center", no_wrap=True)
    table.add_column("worst error", justify="right", no_wrap=True)
    for result in results:
        marks = [marks_of[finding.verdict] for finding in result.findings]
        table.add_row(result.name, *marks, f"{result.worst:.0e}")
    console.print(table)
    legend = Table.grid(padding=(0, 2))
    for letter, row in zip(ascii_lowercase, rows, strict=False):
        legend.add_row(f"[bold]{letter}[/bold]", f"[bold]{row.name}[/bold]", row.promise)
    console.print(legend)
    console.print(f"\n{marks_of['kept']} kept  {marks_of['broken']} broken  {marks_of['not offered']} does not apply")
    for result in results:
        for finding in result.broken:
            console.print(f"[bold red]{result.name}, {finding.row.name}:[/bold red] {escape(finding.detail)}")
    kept = sum(finding.verdict == "kept" for result in results for finding in result.findings)
    broken = sum(len(result.broken) for result in results)
    console.print(f"{kept} promises kept, {broken} broken", highlight=False)


def record_of(result: Conformance) -> ConformanceRecord:
    """A result as its file holds it; errors that were not measured are None."""
    return ConformanceRecord(
        name=result.name,
        conforms=result.conforms,
        findings=tuple(
            FindingRecord(
                row=finding.row.name,
                verdict=finding.verdict,
                error=finding.error if finding.verdict == "kept" else None,
                detail=finding.detail,
            )
            for finding in result.findings
        ),
    )
