"""varifocal measure: what a focused model costs and saves, beside the model that it came from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from varifocal.cli.options import MOST_SEED, JsonFile, Plot, Threads, parse_lengths, require_plots
from varifocal.cli.retrofit import Source, require_model_extra
from varifocal.cli.tables import counting_bar, print_table
from varifocal.results.files import require_folder
from varifocal.threads import use_threads

if TYPE_CHECKING:
    from varifocal.results.focus import FocusMeasure

Focused = Annotated[Path, typer.Argument(help="A folder that `varifocal focus` made.", show_default=False)]
Texts = Annotated[
    str, typer.Option(help="Long documents, others than those of the fit: a source as for `varifocal data prepare`.")
]
Shares = Annotated[str, typer.Option(help="Shares of key heads that read everything, separated by commas.")]
RivalShares = Annotated[
    str | None, typer.Option(help="The shares at which chance and whole layers are measured too. Default: --shares.")
]


def measure(
    focused: Focused,
    source: Source,
    texts: Texts,
    shares: Shares = "0.5,0.3333,0.25",
    rivals_at: RivalShares = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a text.")] = 2048,
    documents: Annotated[int, typer.Option(min=2, help="How many texts.")] = 16,
    questions: Annotated[int, typer.Option(min=0, help="Facts to ask for at each length; 0 for none.")] = 30,
    fact_lengths: Annotated[str, typer.Option(help="Tokens of the texts with facts.")] = "1024,2048",
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Seed of facts and of random maps.")] = 0,
    threads: Threads = None,
    json_file: JsonFile = None,
    plot: Plot = None,
) -> None:
    """Measure a head map beside its dense model: the rise of the loss, and the facts that are still found.

    The scores in FOCUSED/focus.json are measured at several shares on the same tokens as the dense model of SOURCE, and
    so are heads by chance, whole layers in turn, and windows in all heads. Intervals are over documents.

    \b
    varifocal measure smollm2-focused smollm2.gguf --texts novels.parquet --json measured.json --plot measured.png
    """
    require_model_extra()
    require_folder(json_file)
    require_plots(plot)
    from varifocal.data.documents import read_documents
    from varifocal.retrofit.focus.comparison import Measuring, measure_folder

    wanted = Measuring(
        length=length, documents=documents, questions=questions, fact_lengths=parse_lengths(fact_lengths),
        shares=parse_shares(shares), rival_shares=parse_shares(shares if rivals_at is None else rivals_at), seed=seed,
    )  # fmt: skip
    use_threads(threads)
    console = Console(soft_wrap=True, highlight=False)
    with counting_bar(console=console) as bar:
        task = bar.add_task("measuring", total=None)
        result = measure_folder(
            focused, source, read_documents(texts), wanted, named=Path(texts).name,
            on_row=lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip
    show(console, result)
    if json_file is not None:
        result.write(json_file)
    if plot is not None:
        from varifocal.report.focus_plot import plot_focus

        plot_focus(result, plot)


def show(console: Console, result: FocusMeasure) -> None:
    """The table of all maps."""
    from varifocal.report.focus import focus_table

    found = ", ".join(f"{share:.0%} at {length}" for length, share in result.dense_found.items())
    console.print(
        f"dense: loss {result.dense_loss.mean:.4f} on {result.documents} texts of {result.length} tokens"
        + (f"; facts found {found}" if found else "")
    )
    print_table(console, "against dense", focus_table(result))


def parse_shares(text: str) -> tuple[float, ...]:
    """The shares in a text such as 0.5,0.25, from 0 to 1."""
    try:
        shares = tuple(float(part) for part in text.split(",") if part)
    except ValueError as error:
        raise ValueError(f"shares are numbers from 0 to 1, separated by commas, got {text!r}") from error
    if not all(0 <= share <= 1 for share in shares):
        raise ValueError(f"shares are numbers from 0 to 1, separated by commas, got {text!r}")
    return shares
