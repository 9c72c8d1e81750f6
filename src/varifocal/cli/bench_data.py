"""varifocal bench data: the speed of reading alone, on one core."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from varifocal.cli.options import JsonFile, Rounds, parse_lengths
from varifocal.cli.tables import print_table
from varifocal.results.files import require_folder

Data = Annotated[Path | None, typer.Argument(metavar="DATA", help="A prepared data set. Default: random tokens.")]


def data(
    folder: Data = None,
    lengths: Annotated[str, typer.Option(help="Lengths of the rows, separated by commas.")] = "512,2048,8192",
    tokens: Annotated[int, typer.Option(min=1 << 16, help="Random tokens to make if no DATA is given.")] = 1 << 26,
    rounds: Rounds = 5,
    steps: Annotated[int, typer.Option(min=1, help="Batches of 65,536 tokens per turn.")] = 32,
    json_file: JsonFile = None,
) -> None:
    """Time reading alone, on one core: packed and shuffled rows beside a plain numpy memmap slice, which is the limit.

    Rows are compared with the slice before anything is timed. The files are in the system's cache, as they are in
    training after the first epoch.

    [bold]Examples[/bold]

      varifocal bench data

      varifocal bench data data/sotu --lengths 1024 --json reading.json
    """
    from varifocal.bench.data.run import ReadingPlan, bench_data, bench_random_data
    from varifocal.data import open_data
    from varifocal.report.data_bench import reading_table

    require_folder(json_file)
    plan = ReadingPlan(lengths=parse_lengths(lengths), rounds=rounds, steps=steps)
    console = Console()
    with console.status("reading"):
        result = bench_random_data(plan, tokens=tokens) if folder is None else bench_data(open_data(folder), plan)
    print_table(console, "million tokens a second on one core (and as a ratio)", reading_table(result))
    console.print(f"{result.environment.processor}; the aim is {result.aim / 1e6:.0f}", highlight=False)
    if json_file is not None:
        result.write(json_file)
