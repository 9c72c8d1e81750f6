"""varifocal bench plan: predicted and measured steps on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from varifocal.cli.files import require_folder, write_atomically
from varifocal.cli.numbers import parse_lengths
from varifocal.cli.tables import print_table, progress_bar
from varifocal.device import CPU, SharedCpu
from varifocal.report.plan_check import error_table, plan_table, read_plan_check


def plan(
    presets: Annotated[str, typer.Option(help="Presets, separated by commas.")] = "tiny,small,qwen-134m",
    lengths: Annotated[str, typer.Option(help="Lengths of the text, separated by commas.")] = "256,1024,2048",
    contender: Annotated[
        list[str] | None,
        typer.Option("--contender", "-c", help="A mechanism as `bench model` names them; repeat for several."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's choice.")] = None,
    clock: Annotated[
        str,
        typer.Option(help="wall; or processor, for a machine that others use too: processor time of one thread."),
    ] = "wall",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which all take turns.")] = 3,
    memory: Annotated[bool, typer.Option(help="Measure peak memory too, each in a process of its own.")] = True,
    memory_of: Annotated[
        Path | None,
        typer.Option(help="Only measure the memory of those rows of this result that have none, and predict all anew."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result to this file.", dir_okay=False)
    ] = None,
) -> None:
    """Compare the cost model of `varifocal plan` with this machine: predicted and measured step time and memory.

    The machine's rates are measured first, each by itself (a product, a copy, each mechanism's attention at one length,
    an operator with nothing to do); whole training steps are then predicted from them and measured.

    \\b
    varifocal bench plan --presets tiny --lengths 256,512
    varifocal bench plan --threads 2 --json results/plan_check.json
    """
    if json_file is not None:
        require_folder(json_file)
    if clock not in ("wall", "processor"):
        raise ValueError(f"unknown clock {clock!r}; known are wall, processor")
    if clock == "processor" and threads != 1:
        raise ValueError("processor time adds up over threads; use --clock processor with --threads 1")
    if threads is not None:
        torch.set_num_threads(threads)
    from varifocal.bench.plan.run import PlanCheck, add_memory, add_predictions, bench_plan

    with progress_bar() as progress:
        task = progress.add_task("starting", total=None)

        def show(doing: str) -> None:
            progress.update(task, description=doing)

        def save(content: dict[str, Any]) -> None:
            if json_file is not None:
                write_atomically(json_file, json.dumps(content, indent=1) + "\n")

        if memory_of is not None:
            content = read_plan_check(memory_of)
            add_predictions(content)
            add_memory(content, on_step=show)
            write_atomically(memory_of, json.dumps(content, indent=1) + "\n")
        else:
            chosen = {} if contender is None else {"names": tuple(contender)}
            check = PlanCheck(
                presets=parse_presets(presets),
                lengths=parse_lengths(lengths),
                rounds=rounds,
                memory=memory,
                **chosen,
            )
            content = bench_plan(check, clock=CPU if clock == "wall" else SharedCpu(), on_step=show, on_rows=save)
            save(content)
    print_result(content)


def parse_presets(text: str) -> tuple[str, ...]:
    """Names of presets, separated by commas."""
    from varifocal.model import PRESETS

    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; known are {', '.join(PRESETS)}")
    return names


def print_result(content: dict[str, Any]) -> None:
    """Every step, the errors, and where it was measured."""
    console = Console()
    print_table(console, "a training step of one row: measured and predicted", plan_table(content))
    print_table(console, "errors of the predictions", error_table(content))
    shared, machine = content["environment"], content["machine"]
    rates = f"{machine['products']['float32'] / 1e9:.0f} GFLOP/s, {machine['bandwidth'] / 1e9:.1f} GB/s"
    console.print(f"{shared['processor']}, {shared['threads']} threads, torch {shared['torch']}: {rates}")
