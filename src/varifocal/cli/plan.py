"""varifocal plan: what a training run will take, before anybody pays for it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from varifocal.cli.options import Preset, parse_count
from varifocal.cli.tables import print_table
from varifocal.results.files import require_folder

if TYPE_CHECKING:
    from varifocal.results.hardware import Hardware
    from varifocal.results.prediction import PlanPrediction

Mechanisms = Annotated[
    list[str] | None, typer.Option("--mechanism", "-m", help="A mechanism; repeat for several. Default: all.")
]
Gpu = Annotated[
    str, typer.Option(help="v100, a10, l4, l40s, 3090, 4090, a100-40, a100-80, h100, h200; or this-machine.")
]
MicroBatch = Annotated[
    int | None, typer.Option(min=1, help="Rows that a GPU computes at once. Default: the most that fit.")
]
Checkpointing = Annotated[
    bool, typer.Option("--checkpointing", help="Keep only the input of each layer, and compute the rest twice.")
]
Price = Annotated[
    float | None, typer.Option(min=0, help="Dollars an hour for one GPU. Default: the table's price, an assumption.")
]
Calibration = Annotated[
    Path | None,
    typer.Option(
        help="For this-machine: take its rates from this result of `varifocal bench plan` instead of measuring them.",
        dir_okay=False,
    ),
]
Papers = Annotated[
    bool, typer.Option("--papers", help="Show the papers' tables of memory and speed beside the cost model's.")
]
PredictionsFile = Annotated[
    Path | None, typer.Option("--json", help="Also write the predictions to this file.", dir_okay=False)
]


def plan(
    preset: Preset = "qwen-134m",
    mechanism: Mechanisms = None,
    gpu: Gpu = "a100",
    gpus: Annotated[int, typer.Option(min=1, help="How many GPUs, data parallel; more than 8 make several nodes.")] = 8,
    tokens: Annotated[str, typer.Option(help="Tokens to train on, such as 500M or 10B.")] = "10B",
    context: Annotated[int | None, typer.Option(min=2, help="Tokens per row. Default: the preset's.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows per optimizer step, over all GPUs.")] = 512,
    micro_batch: MicroBatch = None,
    precision: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    checkpointing: Checkpointing = False,
    price: Price = None,
    calibration: Calibration = None,
    papers: Papers = False,
    json_file: PredictionsFile = None,
) -> None:
    """Predict memory by part, tokens a second, hours and cost of a training run, for each mechanism.

    The predictions come from the cost model of docs/scaling.md: it counts operations and bytes of a step from the code
    and assumes what part of its data sheet a GPU reaches. The assumptions are printed with the answer. Nothing here was
    run on a GPU; `varifocal bench plan` compares the cost model with this machine.

    \b
    varifocal plan --preset qwen-134m --gpu a100 --gpus 8 --tokens 10B --context 2048
    varifocal plan -m dense -m head_gated --gpu h100 --gpus 16 --price 2.5
    varifocal plan --gpu 4090 --gpus 1 --context 8192 --checkpointing
    varifocal plan --preset tiny --gpu this-machine --gpus 1 --tokens 5M --batch 16
    varifocal plan --papers
    """
    require_folder(json_file)
    from varifocal.bench.plan.calibration import find_hardware, is_here
    from varifocal.plan.hardware import find_precision
    from varifocal.plan.predictions import predict_all

    products = "float32" if is_here(gpu) and precision == "bfloat16" else find_precision(precision)
    measuring = is_here(gpu) and calibration is None
    with Console(stderr=True).status("measuring this machine") if measuring else nullcontext():
        hardware = find_hardware(gpu, calibration)
    if papers:
        print_papers(Console(), hardware, gpus=gpus, context=context)
        return
    found = predict_all(
        preset, hardware, names=mechanism, tokens=parse_count(tokens), context=context, batch=batch, devices=gpus,
        micro_batch=micro_batch, precision=products, checkpointing=checkpointing, price=price,
    )  # fmt: skip
    print_predictions(Console(), found, preset, price=price)
    if json_file is not None:
        found.write(json_file)


def print_predictions(console: Console, found: PlanPrediction, preset: str, *, price: float | None) -> None:
    """Print what each mechanism takes, its memory and time by part, what does not fit, and all that is assumed."""
    from varifocal.report.prediction import (
        assumed,
        limits_table,
        misfits,
        parts_tables,
        prediction_table,
        prediction_title,
        rates,
    )

    print_table(console, prediction_title(found, preset), prediction_table(found))
    for title, rows in (*parts_tables(found), limits_table(found)):
        print_table(console, title, rows)
    for name, reason in misfits(found).items():
        console.print(f"[bold red]{name} does not fit:[/bold red] {reason}", highlight=False, soft_wrap=True)
    for note in found.base.notes:
        console.print(f"[dim]dense: {note}[/dim]", highlight=False, soft_wrap=True)
    hardware = found.hardware
    if price is None and hardware.price is not None:
        console.print(
            f"[dim]${hardware.price:.2f} an hour of one {hardware.name} is an assumption; set yours with --price[/dim]",
            highlight=False,
        )
    console.print(f"[bold]{hardware.name}[/bold] {rates(found)}", highlight=False, soft_wrap=True)
    if not hardware.measured:
        where = "(docs/scaling.md; nothing here was run on a GPU)"
        console.print(f"[bold]assumed[/bold] {where}: {assumed(found)}", highlight=False, soft_wrap=True)


def print_papers(console: Console, hardware: Hardware, *, gpus: int, context: int | None) -> None:
    """Print the papers' orders of memory and speed beside the cost model's, for our kernels and for prototypes."""
    from varifocal.plan.paper_plan import WAYS, paper_checks

    for table, ways in paper_checks(hardware, gpus=gpus, context=context):
        first = ways[WAYS[0]]
        rows = [[first.quantity, "paper", *WAYS]]
        for place, row in enumerate(first.rows):
            ours = [f"{ways[way].rows[place].predicted:.2f}x" for way in WAYS]
            rows.append([f"{row.method} ({row.mechanism})", f"{row.paper:.2f}x", *ours])
        print_table(console, f"{table.name}: {first.quantity}, baseline = 1", rows)
        for way, check in ways.items():
            for sentence in check.disagreements:
                console.print(f"[yellow]{way}:[/yellow] {sentence}", highlight=False, soft_wrap=True)
            if not check.disagreements:
                console.print(f"[green]{way}:[/green] the same order as the paper's", highlight=False)
