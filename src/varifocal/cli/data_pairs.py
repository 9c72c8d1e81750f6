"""varifocal data pairs: associative recall in the field's form."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from varifocal.cli.data_tables import print_splits, require_packages
from varifocal.cli.options import MOST_SEED, parse_numbers
from varifocal.data.splits import splits_from


def pairs(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder of the data set.", show_default=False)],
    texts: Annotated[int, typer.Option(min=1, help="Texts in all splits together.")] = 20_000,
    length: Annotated[int, typer.Option(min=8, help="Tokens per text; read the data in rows of this length.")] = 256,
    pairs: Annotated[
        str, typer.Option(help="Numbers of facts and questions, separated by commas; each text draws one.")
    ] = "4,8,16,32",
    vocabulary: Annotated[int, typer.Option(min=8, help="Number of tokens; half are keys, half are values.")] = 8192,
    splits: Annotated[str, typer.Option(help="Shares of train/validation/test.")] = "80/10/10",
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Another seed makes other texts.")] = 0,
) -> None:
    """Make a data set of associative recall in the field's form (MQAR): facts first, then noise with the questions.

    Every text begins with its facts, each a key and its value. Later each key comes once more, mostly soon after the
    facts, and the model must give its value. Two layers, 4 to 64 pairs and lengths of 128 to 512 are customary.

    [bold]Examples[/bold]

      varifocal data pairs data/mqar

      varifocal data pairs data/mqar_512 --length 512 --pairs 4,8,16,32,64
    """
    require_packages()
    from varifocal.data.paired_recall import PairedRecall, make_paired_recall

    wanted = PairedRecall(
        length=length, pairs=parse_numbers(pairs, what="pairs"), vocabulary=vocabulary, seed=seed
    )  # fmt: skip
    prepared = make_paired_recall(out, wanted, texts=texts, splits=splits_from(splits))
    console = Console()
    print_splits(console, prepared)
    console.print(
        f"{pairs} facts in every text of {length} tokens; a guess is right {1 / wanted.values:.2%} of the time",
        highlight=False,
    )
