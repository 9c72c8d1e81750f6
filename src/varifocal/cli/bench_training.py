"""varifocal bench training: what the training loop costs beyond the bare step."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from rich.console import Console

from varifocal.cli.options import JsonFile, Preset, Threads
from varifocal.cli.tables import shown_count
from varifocal.results.files import require_folder
from varifocal.threads import use_threads


def training(
    preset: Preset = "tiny",
    mechanism: Annotated[str, typer.Option("--mechanism", "-m", help="The mechanism of all layers.")] = "head_gated",
    batch: Annotated[int, typer.Option(min=1, help="Rows per step.")] = 8,
    length: Annotated[int, typer.Option(min=2, help="Tokens per row.")] = 512,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each kind that are counted.")] = 30,
    threads: Threads = None,
    json_file: JsonFile = None,
) -> None:
    """Time the steps of `varifocal train` beside bare steps (forward, backward, AdamW) of the same model.

    They take turns in one process. The training loop also reads its data, clips gradients, follows its schedule, checks
    for NaN and writes metrics.

    [bold]Examples[/bold]

    varifocal bench training --threads 2

    varifocal bench training --preset small --length 1024 --json results/training_bench.json
    """
    require_folder(json_file)
    from varifocal.bench.training.run import Plan, bench_training

    use_threads(threads)
    plan = Plan(preset=preset, mechanism=mechanism, batch=batch, length=length, steps=steps)
    with shown_count("training steps and bare steps in turn") as show:
        found = bench_training(plan, on_step=show)
    Console().print(
        f"{preset}, {mechanism}, {batch} x {length} tokens, {torch.get_num_threads()} threads, {found.steps} steps: "
        f"a bare step takes {found.bare_seconds * 1e3:.1f} ms, one of the training loop "
        f"{found.loop_seconds * 1e3:.1f} ms, {100 * (found.loop_over_bare - 1):+.1f} %",
        highlight=False,
        soft_wrap=True,
    )
    if json_file is not None:
        found.write(json_file)
