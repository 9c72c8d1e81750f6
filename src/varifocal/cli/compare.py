"""varifocal compare: the same model, data and budget, only the attention changed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

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
    int,
    typer.Option(min=1, help="Cells to run at once, each in its own process, with a GPU of its own if there are any."),
]
PilotFlag = Annotated[
    bool,
    typer.Option(
        "--pilot", help="Run two seeds of the baseline and of the first other mechanism, and tell what all could show."
    ),
]


def compare(
    config: Config,
    out: Out,
    set_: Settings = None,
    seeds: Seeds = None,
    workers: Workers = 1,
    pilot: PilotFlag = False,
) -> None:
    """Train every mechanism with every seed on the same data in the same order, and compare.

    OUT holds a run directory for each cell, comparison.json, comparison.md and curves.png. Run the same command again
    to continue where it stopped: finished cells are kept, an interrupted one is resumed, and you may add mechanisms or
    seeds. The loss on the test split is computed once, at the end. With --pilot, a few cells tell how many seeds an
    effect needs; the comparison then goes on from them.

    [bold]Examples[/bold]

      varifocal compare configs/compare.toml runs/compare

      varifocal compare configs/compare.toml runs/compare --pilot

      varifocal compare configs/cpu/compare_fineweb.toml runs/fineweb --workers 2 --set run.threads=1

      varifocal compare configs/compare.toml runs/longer --set optimization.steps=2000 --seeds 0,1,2
    """
    require_packages()
    from varifocal.experiments.comparison_plan import load_plan

    plan = load_plan(config, set_ or [], seeds=parse_seeds(seeds))
    if pilot:
        run_and_weigh(plan, out, workers=workers)
        return
    say_what_can_be_told(plan, out)
    run_and_report(plan, out, workers=workers)


def run_and_weigh(plan: ComparisonPlan, out: Path, *, workers: int) -> None:
    """Run the pilot, and print what it says about the plan."""
    from varifocal.experiments.pilot import pilot_plan, run_pilot
    from varifocal.report.pilot import context_table, findings, power_table
    from varifocal.results.pilot import Pilot

    with counting_bar("cells") as bar:
        show = showing(bar, cells=len(pilot_plan(plan).cells()))
        found, failed = run_pilot(plan, out, workers=workers, on_progress=show)
    console = Console(highlight=False)
    if found is None:
        stop_at_failed(console, failed)
        return
    print_table(console, f"what far text is worth to {found.baseline}", context_table(found))
    print_table(console, "seeds needed", power_table(found))
    for sentence in findings(found):
        console.print(escape(sentence), soft_wrap=True)
    console.print(f"\nwritten to {out}: {Pilot.filename}, cells/", soft_wrap=True)
    console.print("next: the same command without --pilot; it keeps these cells", soft_wrap=True)


def say_what_can_be_told(plan: ComparisonPlan, out: Path) -> None:
    """Print what the plan's pilot says of its seeds, before hours go into them; nothing if nobody asked."""
    from varifocal.report.pilot import power
    from varifocal.results.pilot import Pilot

    console = Console(highlight=False)
    file = out / Pilot.filename
    if file.is_file():
        told = power(
            replace(Pilot.read(file), smallest_effect=plan.smallest_effect),
            seeds=len(plan.seeds),
            differences=max(1, len(plan.arms) - 1),
        )
        console.print(escape(told), soft_wrap=True)
    elif plan.smallest_effect is not None:
        effect = f"an effect of {plan.smallest_effect:g}"
        console.print(f"whether {len(plan.seeds)} seeds can tell {effect} is not known; --pilot tells", soft_wrap=True)


def showing(bar: Progress, *, cells: int) -> Callable[[CellProgress], None]:
    """What shows progress on the bar."""
    task = bar.add_task("starting", total=cells)

    def show(progress: CellProgress) -> None:
        loss = "" if progress.loss is None else f", loss {progress.loss:.3f}"
        step = f" step {progress.step}/{progress.steps}{loss}" if progress.steps else ""
        bar.update(task, completed=progress.done, total=progress.cells, description=f"{progress.cell}{step}")

    return show


def stop_at_failed(console: Console, failed: dict[str, str]) -> None:
    """Name the cells that failed, and end with exit code 1 if there are any."""
    for name, reason in failed.items():
        console.print(f"[bold red]{escape(name)} failed:[/bold red] {escape(reason)}", soft_wrap=True)
    if failed:
        console.print("run the same command again to resume what failed", soft_wrap=True)
        raise typer.Exit(1)


def run_and_report(plan: ComparisonPlan, out: Path, *, workers: int) -> None:
    """Run what is missing; print the tables, and write the page and the picture to the folder."""
    from varifocal.experiments.comparison import compare as run_cells
    from varifocal.report.comparison_files import write_comparison_files

    with counting_bar("cells") as bar:
        outcome = run_cells(plan, out, workers=workers, on_progress=showing(bar, cells=len(plan.cells())))
    console = Console(highlight=False)
    if outcome.comparison is not None:
        write_comparison_files(outcome.comparison, out)
        print_comparison(console, outcome.comparison)
        console.print(f"\nwritten to {out}: comparison.md, comparison.json, curves.png, cells/", soft_wrap=True)
        if len(plan.seeds) == 1:
            console.print("next: run the same command with --seeds 0,1,2; several seeds give intervals", soft_wrap=True)
        print_answer(console, outcome.comparison)
    stop_at_failed(console, outcome.failed)


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
