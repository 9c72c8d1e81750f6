"""varifocal data probe: questions that only attention over a certain distance can answer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from varifocal.cli.data_tables import print_splits, require_packages
from varifocal.cli.options import MOST_SEED, parse_numbers
from varifocal.data.splits import splits_from

Distances = Annotated[
    str, typer.Option(help="Distances from a question back to its fact, separated by commas; each question draws one.")
]


def probe(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder of the data set.", show_default=False)],
    texts: Annotated[int, typer.Option(min=1, help="Texts in all splits together.")] = 20_000,
    length: Annotated[int, typer.Option(min=8, help="Tokens per text; read the data in rows of this length.")] = 1024,
    questions: Annotated[int, typer.Option(min=1, help="Facts and questions in a text.")] = 8,
    distances: Distances = "8,64,512",
    keys: Annotated[int, typer.Option(min=1, help="Number of different keys.")] = 64,
    values: Annotated[
        int, typer.Option(min=2, help="Number of different values; one guess in this many is right.")
    ] = 64,
    noise: Annotated[int, typer.Option(min=1, help="Number of different tokens that mean nothing.")] = 128,
    splits: Annotated[str, typer.Option(help="Shares of train/validation/test.")] = "80/10/10",
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Another seed makes other texts.")] = 0,
) -> None:
    """Make a data set of questions that only attention over a certain distance can answer.

    Facts (a key and its value) are hidden in noise; later the key comes again, and the model must give its value.
    Attention within a window cannot answer once the distance exceeds layers times window.

    [bold]Examples[/bold]

      varifocal data probe data/recall

      varifocal data probe data/far --length 2048 --distances 16,256,1024 --questions 16
    """
    require_packages()
    from varifocal.data.probe import Probe, make_probe

    wanted = Probe(
        length=length, questions=questions, distances=parse_numbers(distances, what="distances"), keys=keys,
        values=values, noise=noise, seed=seed,
    )  # fmt: skip
    prepared = make_probe(out, wanted, texts=texts, splits=splits_from(splits))
    console = Console()
    print_splits(console, prepared)
    console.print(
        f"{questions} questions in every text of {length} tokens, distances {distances}; a guess is right "
        f"{1 / values:.1%} of the time",
        highlight=False,
    )
