"""varifocal bench serving: what fits into a cache of vLLM, and how fast requests are answered."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from varifocal.cli.options import JsonFile, Plot, Threads, require_plots
from varifocal.cli.tables import print_table, shown_steps
from varifocal.report.serving_bench import capacity_table, settings_sentence, speed_table
from varifocal.results.files import require_folder
from varifocal.threads import use_threads

if TYPE_CHECKING:
    from varifocal.results.serving_bench import ServingBench

Folders = Annotated[
    list[Path],
    typer.Argument(help="Saved models; ratios are to the first.", show_default=False),
]
Python = Annotated[
    str | None, typer.Option(metavar="FILE", help="A Python interpreter that has vLLM. Default: this one.")
]
Context = Annotated[int, typer.Option(min=1, help="Tokens of a text, where it is counted what fits.")]
CacheBytes = Annotated[int, typer.Option(min=1, help="The cache in which that is counted.")]
Requests = Annotated[int, typer.Option(min=1, help="Requests that come at once.")]
Prompt = Annotated[int, typer.Option(min=1, help="Tokens of each request's prompt.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Tokens of each answer.")]
Held = Annotated[int, typer.Option(min=1, help="The small cache holds so many requests of the first model.")]
Dtype = Annotated[str, typer.Option(help="float32 or bfloat16.")]
Block = Annotated[int, typer.Option(min=1, help="Tokens of a block of the cache.")]
Chunk = Annotated[int, typer.Option(min=1, help="Tokens that are read at once, at most.")]


def serving(
    folders: Folders,
    python: Python = None,
    context: Context = 8192,
    cache_bytes: CacheBytes = 1 << 30,
    requests: Requests = 16,
    prompt: Prompt = 1536,
    new_tokens: NewTokens = 512,
    held: Held = 4,
    dtype: Dtype = "float32",
    block: Block = 32,
    chunk: Chunk = 256,
    threads: Threads = None,
    json_file: JsonFile = None,
    plot: Plot = None,
) -> None:
    """Serve saved models with vLLM: tokens that fit into a cache, requests a second, time per token, memory.

    Each model is served twice in a process of its own: with room for all requests, and with a small cache, the same
    for all models, in which requests wait for each other. All figures are vLLM's own.

    \b
    varifocal bench serving runs/dense runs/demo --threads 2
    varifocal bench serving runs/dense runs/demo --python .venv-serving/bin/python --json serving.json
    """
    require_folder(json_file)
    require_folder(plot)
    require_plots(plot)
    from varifocal.bench.serving.run import Plan, bench_serving

    plan = Plan(
        folders=tuple(folders), python=python, context=context, cache_bytes=cache_bytes, requests=requests,
        prompt=prompt, new_tokens=new_tokens, held=held, dtype=dtype, block=block, chunk=chunk,
    )  # fmt: skip
    use_threads(threads)
    with shown_steps() as show:
        found = bench_serving(plan, on_step=lambda step: show(step.doing, step.done, step.total))
    print_result(Console(), found)
    if json_file is not None:
        found.write(json_file)
    if plot is not None:
        from varifocal.report.serving_bench_plot import plot_serving_bench

        plot_serving_bench(found, plot)


def print_result(console: Console, found: ServingBench) -> None:
    """Print what fits, a table for each setting, and the machine."""
    print_table(console, None, capacity_table(found))
    for setting in dict.fromkeys(row.setting for row in found.rows):
        print_table(console, None, speed_table(found, setting))
    shared = found.environment
    console.print(f"{settings_sentence(found)}; {shared.processor}, {shared.threads} threads", highlight=False)
