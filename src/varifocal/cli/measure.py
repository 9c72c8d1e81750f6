"""varifocal measure: what a focused model costs and saves, beside the model that it came from."""

from __future__ import annotations

from functools import partial
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
    from varifocal.bench.focus.measuring import Parts
    from varifocal.results.focus import FocusMeasure

Focused = Annotated[Path, typer.Argument(help="A folder that `varifocal focus` made.", show_default=False)]
TextSources = Annotated[
    list[str] | None,
    typer.Option(
        "--texts",
        metavar="SOURCE",
        help="Long documents, others than those of the fit: a source as for `varifocal data prepare`; repeat for "
        "several. Facts are planted into the last one's.",
    ),
]
Also = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FOLDER",
        help="Another folder of `varifocal focus` on the same model (another seed, another way); repeat.",
    ),
]
Shares = Annotated[str, typer.Option(help="Shares of key heads that read everything, separated by commas.")]
RivalShares = Annotated[
    str | None,
    typer.Option(
        help="The shares at which chance and whole layers are measured too; empty for none. Default: --shares."
    ),
]
RandomMaps = Annotated[int, typer.Option(min=1, help="How many maps by chance are measured at each of --rivals-at.")]
Ruler = Annotated[
    int, typer.Option(min=0, help="Questions of each of RULER's tasks that need no data; wants lm-eval. 0 for none.")
]
RulerLengths = Annotated[str, typer.Option(help="Tokens of RULER's texts.")]
Speed = Annotated[str, typer.Option(help="Time prefill and decoding after prompts of these lengths; empty for none.")]


def measure(
    focused: Focused,
    source: Source,
    texts: TextSources = None,
    also: Also = None,
    shares: Shares = "0.5,0.3333,0.25",
    rivals_at: RivalShares = None,
    random_maps: RandomMaps = 1,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a text.")] = 2048,
    documents: Annotated[int, typer.Option(min=0, help="How many texts of each source; 0 for none.")] = 16,
    questions: Annotated[int, typer.Option(min=0, help="Facts to ask for at each length; 0 for none.")] = 30,
    fact_lengths: Annotated[str, typer.Option(help="Tokens of the texts with facts.")] = "1024,2048",
    curve: Annotated[int, typer.Option(min=0, help="Dense's own loss by position up to here; 0 for none.")] = 0,
    curve_documents: Annotated[int, typer.Option(min=1, help="Texts of each source for --curve.")] = 8,
    ruler: Ruler = 0,
    ruler_lengths: RulerLengths = "2048",
    caches: Annotated[str, typer.Option(help="Measure caches of these lengths; empty for none.")] = "2048,4096,8192",
    speed: Speed = "",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of --speed, in which all take turns.")] = 2,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Seed of facts and of random maps.")] = 0,
    threads: Threads = None,
    json_file: JsonFile = None,
    plot: Plot = None,
) -> None:
    """Measure a head map beside its dense model: the rise of the loss, facts still found, memory and speed.

    The scores in FOCUSED/focus.json are measured at several shares on the same tokens as the dense model of SOURCE, and
    so are heads by chance, whole layers in turn, and windows in all heads. Intervals are over documents. What the file
    of --json holds already is not measured again: an interrupted measurement goes on, and parts can be added.

    [bold]Examples[/bold]

    varifocal measure runs/demo smollm2 --texts my.txt --length 1024 --json measured.json --plot measured.png

    varifocal measure runs/demo smollm2 --documents 0 --questions 0 --speed 2048,8192 --json measured.json
    """
    require_model_extra()
    require_folder(json_file)
    require_plots(plot)
    from varifocal.bench.focus.measuring import Parts
    from varifocal.retrofit.focus.comparison import Measuring

    wanted = Measuring(
        length=length, documents=documents, questions=questions, fact_lengths=parse_lengths(fact_lengths),
        shares=parse_shares(shares), rival_shares=parse_shares(shares if rivals_at is None else rivals_at),
        curve_length=curve, curve_documents=curve_documents, seed=seed,
        random_maps=random_maps, ruler=ruler, ruler_lengths=parse_lengths(ruler_lengths),
    )  # fmt: skip
    lengths = [parse_lengths(given) if given else () for given in (caches, speed)]
    use_threads(threads)
    console = Console(soft_wrap=True, highlight=False)
    parts = Parts(texts=wanted, caches=lengths[0], speed=lengths[1], rounds=rounds)
    result = run([focused, *(also or ())], source, texts or [], parts, file=json_file, console=console)
    show(console, result)
    if plot is not None:
        from varifocal.report.focus_plot import plot_focus

        plot_focus(result, plot)


def run(
    folders: list[Path], source: str, texts: list[str], parts: Parts, *, file: Path | None, console: Console
) -> FocusMeasure:
    """Measure, with a bar that says what is measured and how far it is."""
    from varifocal.analysis.row_kinds import row_kinds
    from varifocal.bench.focus.measuring import measure_focused
    from varifocal.data.documents import read_documents
    from varifocal.retrofit.focus.comparison import Texts

    sources = [Texts(Path(name).stem, partial(read_documents, name)) for name in texts]
    with counting_bar(console=console) as bar:
        task = bar.add_task("measuring", total=None)

        def count(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        return measure_focused(folders, source, sources, parts, file=file, kinds=row_kinds, on_count=count)


def show(console: Console, result: FocusMeasure) -> None:
    """Print all tables that have rows."""
    from varifocal.report.focus import cache_table, curve_table, fact_table, loss_table, ruler_table, speed_table

    for title, table in (
        ("dense: loss by position", curve_table(result)),
        ("loss against dense, 95 % intervals over documents", loss_table(result)),
        ("facts found of those that dense finds, and where they stood", fact_table(result)),
        ("RULER, with 95 % intervals over questions", ruler_table(result)),
        ("cache, and what is alive in a request against dense", cache_table(result)),
        ("speed", speed_table(result)),
    ):
        if len(table) > 1:
            print_table(console, title, table)


def parse_shares(text: str) -> tuple[float, ...]:
    """The shares in a text such as 0.5,0.25, from 0 to 1."""
    try:
        shares = tuple(float(part) for part in text.split(",") if part)
    except ValueError as error:
        raise ValueError(f"shares are numbers from 0 to 1, separated by commas, got {text!r}") from error
    if not all(0 <= share <= 1 for share in shares):
        raise ValueError(f"shares are numbers from 0 to 1, separated by commas, got {text!r}")
    return tuple(dict.fromkeys(shares))
