"""varifocal evaluate: a model's loss on prepared data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from varifocal.cli.options import ANY_MODEL, JsonFile, Threads
from varifocal.cli.tables import print_table, shown_count
from varifocal.results.files import require_folder
from varifocal.threads import use_threads

if TYPE_CHECKING:
    from varifocal.data import PreparedData
    from varifocal.results.evaluation import Evaluation


def evaluate(
    model: Annotated[Path, typer.Argument(help=ANY_MODEL)],
    data: Annotated[Path, typer.Option(metavar="FOLDER", help="A data set made by `varifocal data prepare`.")],
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "validation",
    length: Annotated[int | None, typer.Option(min=2, help="Tokens per row. Default: the model's context.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows per batch.")] = 4,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to read. Default: all.")] = None,
    threads: Threads = None,
    json_file: JsonFile = None,
) -> None:
    """Measure loss, perplexity and bits per byte, and the loss by how much of its document a token can see.

    If the loss keeps falling beyond the window, the context beyond it helps. Bits per byte can be compared between
    tokenizers and languages. For a probe (`varifocal data probe`), it also measures the right answers by distance.

    [bold]Examples[/bold]

    varifocal data prepare sotu data/demo --tokenizer runs/demo/tokenizer.json

    varifocal evaluate runs/demo --data data/demo --length 2048 --tokens 16384

    varifocal evaluate smollm2 --data data/demo --split test --length 2048 --json result.json
    """
    from varifocal.data import open_data
    from varifocal.training.model_evaluation import evaluate_model

    require_folder(json_file)
    use_threads(threads)
    opened = open_data(data)
    with shown_count(f"{split} of {data.name}") as show:
        result = evaluate_model(
            model, opened, split=split, length=length, batch_size=batch, most_tokens=tokens, on_batch=show
        )
    print_evaluation(Console(), result, opened)
    if json_file is not None:
        result.write(json_file)


def print_evaluation(console: Console, result: Evaluation, data: PreparedData) -> None:
    """Print the loss, its curve, and the right answers to a probe."""
    console.print(
        f"loss {result.loss:.4f} nats a token, perplexity {result.perplexity:.2f}, {result.bits_per_byte:.4f} bits per "
        f"byte ({result.tokens:,} tokens, rows of {result.length})",
        highlight=False,
        soft_wrap=True,
    )
    curve = [
        [f"{point.least} - {point.most}", f"{point.loss:.4f}", f"{point.spread:.4f}", f"{point.tokens:,}"]
        for point in result.curve
    ]
    print_table(console, "loss by tokens seen", [["tokens seen", "loss", "±", "tokens"], *curve])
    if result.recall:
        from varifocal.training.probe_accuracy import chance

        told = [[str(one.distance), f"{one.accuracy:.1%}", f"{one.questions:,}"] for one in result.recall]
        print_table(console, "right answers by distance", [["distance", "right", "questions"], *told])
        console.print(f"a guess is right {chance(data):.1%} of the time", highlight=False)
