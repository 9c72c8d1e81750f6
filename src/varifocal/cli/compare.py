"""varifocal compare: the same model, data and budget, only the attention changed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from varifocal.cli.options import parse_numbers
from varifocal.cli.tables import counting_bar, print_table

if TYPE_CHECKING:
    from varifocal.experiments.comparison import CellProgress
    from varifocal.experiments.comparison_plan import ComparisonPlan
    from varifocal.statistics.comparison import Comparison

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file, see docs/comparison.md.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The folder of the comparison.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting of the base; repeat for several."),
]
Seeds = Annotated[str | None, typer.Option(help="Seeds instead of the file's, separated by commas: 0,1,2.")]
Workers = Annotated[
    int, typer.Option(min=1, help="Cells to run at once, each in its own process; give each fewer threads.")
]


def compare(config: Config, out: Out, set_: Settings = None, seeds: Seeds = None, workers: Workers = 1) -> None:
    """Train every mechanism with every seed on the same data in the same order, and compare.

    OUT holds a run directory for each cell, comparison.json, comparison.md and curves.png. Run the same command again
    to continue where it stopped: finished cells are kept, an interrupted one is resumed, and you may add mechanisms or
    seeds. The loss on the test split is computed once, at the end.

    [bold]Examples[/bold]

      varifocal compare configs/compare.toml runs/compare

      varifocal compare configs/cpu/compare_fineweb.toml runs/fineweb --workers 2 --set run.threads=1

      varifocal compare configs/compare.toml runs/longer --set optimization.steps=2000 --seeds 0,1,2
    """
    require_packages()
    from varifocal.experiments.comparison_plan import load_plan

    run_and_report(load_plan(config, set_ or [], seeds=parse_seeds(seeds)), out, workers=workers)


def run_and_report(plan: ComparisonPlan, out: Path, *, workers: int) -> None:
    """Run what is missing; print the tables, and write the page and the picture to the folder."""
    from varifocal.experiments.comparison import compare as run_cells
    from varifocal.report.comparison_files import write_comparison_files

    with counting_bar("cells") as bar:
        task = bar.add_task("starting", total=len(plan.cells()))

        def show(progress: CellProgress) -> None:
            loss = "" if progress.loss is None else f", loss {progress.loss:.3f}"
            step = f" step {progress.step}/{progress.steps}{loss}" if progress.steps else ""
            bar.update(task, completed=progress.done, total=progress.cells, description=f"{progress.cell}{step}")

        outcome = run_cells(plan, out, workers=workers, on_progress=show)
    console = Console(highlight=False)
    for name, reason in outcome.failed.items():
        console.print(f"[bold red]{escape(name)} failed:[/bold red] {escape(reason)}", soft_wrap=True)
    if outcome.comparison is not None:
        write_comparison_files(outcome.comparison, out)
        print_comparison(console, outcome.comparison)
        console.print(f"\nwritten to {out}: comparison.md, comparison.json, curves.png, cells/", soft_wrap=True)
        if len(plan.seeds) == 1:
            console.print("next: run the same command with --seeds 0,1,2; several seeds give intervals", soft_wrap=True)
        print_answer(console, outcome.comparison)
    if outcome.failed:
        console.print("run the same command again to resume what failed", soft_wrap=True)
        raise typer.Exit(1)


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print all tables, each with what was scaled down, and a sentence for each arm."""
    from varifocal.report.comparison_tables import all_tables, legend, verdicts

    for title, line, table in all_tables(comparison):
        print_table(console, title, table)
        console.print(escape(line), soft_wrap=True)
        if title == "loss":
            console.print(escape(legend(comparison)), soft_wrap=True)
        console.print()
    for sentence in verdicts(comparison):
        console.print(escape(sentence), soft_wrap=True)


def print_answer(console: Console, comparison: Comparison) -> None:
    """Print what can be concluded, last: it is what stays on the screen."""
    from varifocal.report.page.answer import answer_of_comparison

    answer = answer_of_comparison(comparison)
    console.print(f"\n[bold]{escape(answer.short)}[/bold] {escape(' '.join(answer.reasons))}", soft_wrap=True)


def parse_seeds(text: str | None) -> tuple[int, ...] | None:
    """The seeds in a text such as 0,1,2; None if none were given."""
    return None if text is None else parse_numbers(text, what="seeds")


def require_packages() -> None:
    """ValueError unless the extras `training` and `plots` are installed: better now than after hours of training."""
    missing = [name for name in ("transformers", "accelerate", "matplotlib") if not importlib.util.find_spec(name)]
    if missing:
        raise ValueError(f"this needs {', '.join(missing)}; install with: pip install 'varifocal[training,data,plots]'")
