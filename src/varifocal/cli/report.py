"""varifocal report: one HTML page from the files of runs."""

from __future__ import annotations

import datetime
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

import varifocal
from varifocal.results.files import require_folder, write_whole


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_OR_COMPARISON...", help="Folders of runs and comparisons, or comparison.json."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="The page to write. Default: report.html in the first folder.", dir_okay=False
        ),
    ] = None,
    bench: Annotated[
        Path | None, typer.Option(help="A result of `varifocal bench attention`, for speed and memory.", dir_okay=False)
    ] = None,
    title: Annotated[str | None, typer.Option(help="Title of the page. Default: the first comparison's.")] = None,
    papers: Annotated[
        bool, typer.Option("--papers", help="Write the papers' claims beside comparisons instead, as Markdown.")
    ] = False,
) -> None:
    """Write one HTML page that needs no network: the question and the answer, tables, curves, gates, patterns.

    It only reads files that `varifocal train`, `compare`, `ablate`, `analyze` and `bench attention` wrote, and names
    those that are missing or broken. Every figure comes with its numbers as CSV and the command that made them.

    \b
    varifocal report runs/demo
    varifocal report runs/compare runs/demo -o report.html --bench results/attention_bench.json
    varifocal report runs/compare --papers -o papers.md
    """
    first = paths[0] if paths[0].is_dir() else paths[0].parent
    if papers:
        write_papers(paths, first / "papers.md" if out is None else out)
        return
    write_page(
        paths,
        first / "report.html" if out is None else out,
        bench=bench,
        title=title,
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        say=Console(highlight=False, soft_wrap=True).print,
    )


def write_papers(paths: list[Path], out: Path) -> None:
    """Write the papers' claims with what these comparisons say, finished or not, about each."""
    from varifocal.report.papers import papers_page
    from varifocal.results.comparison import ComparisonRecord, PlanRecord
    from varifocal.statistics.comparison import gather_comparison, read_comparison

    require_folder(out)
    found = {}
    for path in paths:
        whole = not (path / PlanRecord.filename).is_file()
        folder = path.parent if path.name == ComparisonRecord.filename else path
        found[folder.name] = read_comparison(path) if whole else gather_comparison(path)
    write_whole(out, papers_page(found, command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])))
    typer.echo(f"written to {out}")


def write_page(
    paths: list[Path],
    out: Path,
    *,
    command: str,
    bench: Path | None = None,
    title: str | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> Path:
    """Read the files, write the page, and say what is missing and where the page is."""
    from varifocal.report.page.answer import answer_of
    from varifocal.report.page.page import make_page, require_packages
    from varifocal.report.page.sources import read_source
    from varifocal.results.attention_bench import AttentionBench

    require_packages()
    sources = [read_source(path) for path in paths]
    require_folder(out)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    page = make_page(
        sources,
        None if bench is None else AttentionBench.read(bench),
        title=title or sources[0].title,
        command=command,
        made=f"Made {now} by varifocal {varifocal.__version__}",
    )
    write_whole(out, page)
    for note in (note for source in sources for note in source.notes):
        say(f"note: {escape(note)}")
    say(f"written to {escape(str(out))} ({len(page) / 1e6:.1f} MB); open it in a browser")
    for source in sources:
        answer = answer_of(source)
        say(escape(f"{source.title}: {answer.short} {' '.join(answer.reasons)}"))
    return out
