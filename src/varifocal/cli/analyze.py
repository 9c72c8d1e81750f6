"""varifocal analyze: what a model's heads read and what its gates decide."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from varifocal.cli.options import ANY_MODEL, MOST_SEED, Threads
from varifocal.cli.tables import print_table, shown_count
from varifocal.threads import use_threads

Model = Annotated[str, typer.Argument(help=ANY_MODEL)]
Data = Annotated[
    Path,
    typer.Option(metavar="FOLDER", help="A data set made by `varifocal data prepare` with the model's tokenizer."),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="The file to write. Default: analysis/SPLIT.json in the run.", dir_okay=False),
]
Window = Annotated[
    int | None, typer.Option(min=1, help="Keys that count as near. Default: the mechanism's, or length / 8.")
]
Scale = Annotated[
    float | None, typer.Option(min=0, help="The factor c in k = c sqrt(n). Default: the mechanism's, or 1.")
]


def analyze(
    model: Model,
    data: Data,
    out: Out = None,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "validation",
    length: Annotated[int | None, typer.Option(min=2, help="Tokens per row. Default: the model's context.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to read, in rows spread over the split.")] = 32_768,
    window: Window = None,
    k_scale: Scale = None,
    resamples: Annotated[int, typer.Option(min=2, help="How often documents are resampled, for the intervals.")] = 500,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Seed of the resampling.")] = 0,
    tables: Annotated[bool, typer.Option(help="Print the tables too, not only the conclusions.")] = True,
    threads: Threads = None,
) -> None:
    """Measure how much of dense attention a window and top-k recover, and what gates do at which tokens.

    For each head, the tables give the share of its attention mass in the window and on the best k keys, and whether it
    is local or global. For gates, widths and selected keys, they give the mean by kind of token, by position, and where
    the text beyond the window helps. Intervals are 95 % over documents, and p-values are corrected for the number of
    comparisons. `varifocal report` shows everything on a page.

    [bold]Examples[/bold]

    varifocal data prepare sotu data/demo --tokenizer runs/demo/tokenizer.json

    varifocal analyze smollm2 --data data/demo --length 1024 --tokens 8192 -o smollm2.json

    varifocal analyze runs/compare/cells/head_gated-seed0 --data runs/compare/data --window 64
    """
    from varifocal.analysis.analyze import AnalysisPlan
    from varifocal.analysis.files import analyze_model
    from varifocal.data import open_data
    from varifocal.report.analysis import all_tables, findings, gain_sentence

    plan = AnalysisPlan(
        split=split, length=length, tokens=tokens, window=window, k_scale=k_scale, resamples=resamples, seed=seed
    )
    use_threads(threads)
    with shown_count(f"{split} of {data.name}") as show:
        found, file = analyze_model(model, open_data(data), plan, out=out, on_row=show)
    console = Console(highlight=False)
    console.print(escape(found.setting()), soft_wrap=True)
    for title, table in all_tables(found) if tables else ():
        print_table(console, title, table)
    for sentence in (*findings(found), gain_sentence(found)):
        console.print(escape(sentence), soft_wrap=True)
    kept = f"\nwritten to {escape(str(file))}; 'varifocal report' shows it"
    lost = f"\nnot saved: {escape(model)} does not belong to a run; use -o FILE to write the analysis to a file"
    console.print(lost if file is None else kept, soft_wrap=True)
