"""varifocal: the command line, with all its verbs."""

from __future__ import annotations

import io
import sys
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

import varifocal
from varifocal.cli.ablate import ablate
from varifocal.cli.analyze import analyze
from varifocal.cli.bench import bench
from varifocal.cli.check import check
from varifocal.cli.compare import compare
from varifocal.cli.data import data
from varifocal.cli.demo import demo
from varifocal.cli.evaluate import evaluate
from varifocal.cli.explore import explore
from varifocal.cli.focus import focus
from varifocal.cli.generate import generate
from varifocal.cli.info import info
from varifocal.cli.measure import measure
from varifocal.cli.plan import plan
from varifocal.cli.report import report
from varifocal.cli.retrofit import retrofit
from varifocal.cli.train import train
from varifocal.cli.verb import Verb, Verbs

app = typer.Typer(
    name="varifocal",
    cls=Verbs,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Attention that adapts its focus between near and far.

    Every query decides, from its own content, how much to read from the tokens near it and how much from the whole
    text. This command checks, measures and explains the mechanisms of the library; each verb has its own --help.

    Start with [bold]varifocal demo[/bold]: a pretrained model learns to read less, and you see what it saves.""",
)
app.command(cls=Verb)(demo)
app.command(cls=Verb)(check)
app.command(cls=Verb)(info)
app.command(cls=Verb)(train)
app.command(cls=Verb)(compare)
app.command(cls=Verb)(ablate)
app.command(cls=Verb)(generate)
app.command(cls=Verb)(evaluate)
app.command(cls=Verb)(retrofit)
app.command(cls=Verb)(focus)
app.command(cls=Verb)(measure)
app.command(cls=Verb)(analyze)
app.command(cls=Verb)(report)
app.command(cls=Verb)(explore)
app.command(cls=Verb)(plan)
app.add_typer(bench, name="bench")
app.add_typer(data, name="data")


def show_version(wanted: bool) -> None:
    """Print the version and exit, if asked to."""
    if wanted:
        typer.echo(f"varifocal {varifocal.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that come before the verb."""


def run() -> None:
    """Run the command line; a user's mistake ends with one sentence and exit code 2."""
    show_all_characters()
    try:
        app()
    except (ValueError, OSError) as mistake:
        end_with(str(mistake))
    except (MemoryError, RuntimeError) as error:
        if not is_want_of_memory(error):
            raise
        end_with(f"there is not enough memory for this ({one_line(error)}); use smaller sizes")


def show_all_characters() -> None:
    """Where the terminal or file takes no Unicode, put ? for what it cannot show instead of ending with a trace."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def is_want_of_memory(error: Exception) -> bool:
    """Whether an error says that memory could not be had; torch says so in a RuntimeError, each allocator its way."""
    words = str(error)
    return isinstance(error, MemoryError) or "can't allocate memory" in words or "out of memory" in words


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def end_with(sentence: str) -> NoReturn:
    """Say what is wrong in one sentence, and end with exit code 2."""
    Console(stderr=True).print(f"[bold red]varifocal:[/bold red] {escape(sentence)}", highlight=False, soft_wrap=True)
    sys.exit(2)
