"""varifocal evaluate: a model's loss on prepared data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console

from varifocal.cli.files import require_folder, write_atomically
from varifocal.cli.tables import print_table, progress_bar

if TYPE_CHECKING:
    from varifocal.training.probe_accuracy import DistanceAccuracy


def evaluate(
    model: Annotated[Path, typer.Argument(help="A model's folder.")],
    data: Annotated[Path, typer.Option(help="A data set made by `varifocal data prepare`.")],
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "validation",
    length: Annotated[int | None, typer.Option(min=2, help="Tokens of a row; default: the model's context.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows at once.")] = 4,
    tokens: Annotated[int | None, typer.Option(min=1, help="Stop after so many tokens; default: all.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's choice.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result to this file.", dir_okay=False)
    ] = None,
) -> None:
    """Loss, perplexity and bits per byte, and the loss by how much of its document a token can see.

    If the loss goes on falling beyond the window, the context beyond it helps. Bits per byte can be compared between
    tokenizers and languages. For a probe (`varifocal data probe`) also the share of right answers by distance.

    \b
    varifocal evaluate runs/demo/cells/dense-seed0/model --data runs/demo/data
    varifocal evaluate MODEL --data data/recall
    varifocal evaluate MODEL --data DATA --split test --length 2048 --json result.json
    """
    from varifocal.data import open_data
    from varifocal.data.tokenizers import load_tokenizer
    from varifocal.model import load_model
    from varifocal.training.evaluation import evaluate as measure
    from varifocal.training.probe_accuracy import chance, is_probe, probe_accuracy

    if json_file is not None:
        require_folder(json_file)
    if threads is not None:
        torch.set_num_threads(threads)
    opened = open_data(data)
    loaded = load_model(model)
    own = model / "tokenizer.json"
    if own.is_file():
        entry = opened.manifest.tokenizer
        opened.require_tokenizer(load_tokenizer(own, name=str(own), end_token=entry.end_token).fingerprint)
    if opened.manifest.tokenizer.vocabulary > loaded.config.vocab_size:
        raise ValueError(
            f"{data} has {opened.manifest.tokenizer.vocabulary} different tokens, {model} knows "
            f"{loaded.config.vocab_size}; prepare the data with the model's tokenizer"
        )
    if length is None:
        # A row that holds a text of the probe holds the facts to all of its questions.
        length = opened.manifest.source["length"] if is_probe(opened) else loaded.config.max_position_embeddings
    answers: tuple[DistanceAccuracy, ...] = ()
    with progress_bar() as progress:
        task = progress.add_task(f"{split} of {data.name}", total=None)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        what = opened.split(split)
        result = measure(loaded, what, length=length, batch_size=batch, most_tokens=tokens, on_batch=show)
        if is_probe(opened):
            answers = probe_accuracy(loaded, what, length=length, batch_size=batch, most_tokens=tokens, on_batch=show)
    console = Console()
    console.print(
        f"loss {result.loss:.4f} nats a token, perplexity {result.perplexity:.2f}, {result.bits_per_byte:.4f} bits per "
        f"byte ({result.tokens:,} tokens, rows of {result.length})",
        highlight=False,
    )
    curve = [
        [f"{point.least} - {point.most}", f"{point.loss:.4f}", f"{point.spread:.4f}", f"{point.tokens:,}"]
        for point in result.curve
    ]
    print_table(console, "loss by tokens seen", [["tokens seen", "loss", "+-", "tokens"], *curve])
    if answers:
        told = [[str(one.distance), f"{one.accuracy:.1%}", f"{one.questions:,}"] for one in answers]
        print_table(console, "right answers by distance", [["distance", "right", "questions"], *told])
        console.print(f"guessing is right in {chance(opened):.1%}", highlight=False)
    if json_file is not None:
        content = {"model": str(model), "data": str(data), "split": split, **result.as_json()}
        content |= {"recall": [one.as_json() for one in answers]} if answers else {}
        write_atomically(json_file, json.dumps(content, indent=1) + "\n")
