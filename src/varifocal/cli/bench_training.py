"""varifocal bench training: what the training loop costs beside the bare step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from varifocal.cli.files import require_folder, write_atomically
from varifocal.cli.tables import progress_bar


def training(
    preset: Annotated[str, typer.Option(help="A preset; `varifocal info --preset NAME` shows its sizes.")] = "tiny",
    mechanism: Annotated[str, typer.Option("--mechanism", "-m", help="The mechanism of all layers.")] = "head_gated",
    batch: Annotated[int, typer.Option(min=1, help="Rows in a step.")] = 8,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a row.")] = 512,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each that are counted.")] = 30,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's choice.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result to this file.", dir_okay=False)
    ] = None,
) -> None:
    """The steps of `varifocal train` beside bare ones (forward, backward, AdamW) of the same model.

    They take turns in one process. The loop also reads its data, clips gradients, follows its schedule, watches for
    what is not a number and writes metrics.

    Examples

      varifocal bench training --threads 2

      varifocal bench training --preset small --length 1024 --json results/training_bench.json
    """
    if json_file is not None:
        require_folder(json_file)
    from varifocal.bench.training.run import Plan, bench_training

    if threads is not None:
        torch.set_num_threads(threads)
    plan = Plan(preset=preset, mechanism=mechanism, batch=batch, length=length, steps=steps)
    with progress_bar() as bar:
        task = bar.add_task("training steps and bare steps in turn")
        found = bench_training(plan, on_step=lambda done, total: bar.update(task, completed=done, total=total))
    Console().print(
        f"{preset}, {mechanism}, {batch} x {length} tokens, {torch.get_num_threads()} threads, {found['steps']} steps: "
        f"a bare step takes {found['bare_seconds'] * 1e3:.1f} ms, one of the training loop "
        f"{found['loop_seconds'] * 1e3:.1f} ms, {100 * (found['loop_over_bare'] - 1):+.1f} %",
        highlight=False,
        soft_wrap=True,
    )
    if json_file is not None:
        write_atomically(json_file, json.dumps(found, indent=1) + "\n")
