"""varifocal plan: what a training will take before anybody pays for it."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from varifocal.cli.files import require_folder, write_atomically
from varifocal.cli.numbers import parse_count
from varifocal.cli.tables import print_table

if TYPE_CHECKING:
    from varifocal.plan.hardware import Assumptions, Hardware
    from varifocal.plan.plan import Prediction, Training


def plan(
    preset: Annotated[
        str, typer.Option(help="A preset; `varifocal info --preset NAME` shows its sizes.")
    ] = "qwen-134m",
    mechanism: Annotated[
        list[str] | None,
        typer.Option("--mechanism", "-m", help="A mechanism; repeat for several. Default: all."),
    ] = None,
    gpu: Annotated[
        str, typer.Option(help="v100, a10, l4, l40s, 3090, 4090, a100-40, a100-80, h100, h200; or this-machine.")
    ] = "a100",
    gpus: Annotated[int, typer.Option(min=1, help="How many, data parallel; more than 8 are several nodes.")] = 8,
    tokens: Annotated[str, typer.Option(help="Tokens to train on, such as 500M or 10B.")] = "10B",
    context: Annotated[int | None, typer.Option(min=2, help="Tokens of a row; default: the preset's.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows of an optimizer step, over all GPUs.")] = 512,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Rows that a GPU computes at once; default: the most that fits.")
    ] = None,
    precision: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Keep a layer's input only, and compute the rest twice.")
    ] = False,
    price: Annotated[
        float | None, typer.Option(min=0, help="Dollars an hour of one GPU; default: the table's, an assumption.")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="For this-machine: its rates from this result of `varifocal bench plan` instead of a measurement.",
            dir_okay=False,
        ),
    ] = None,
    papers: Annotated[
        bool, typer.Option("--papers", help="Instead: the papers' tables of memory and speed beside the arithmetic.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the predictions to this file.", dir_okay=False)
    ] = None,
) -> None:
    """Predict memory by part, tokens a second, hours and cost of a training, for each mechanism.

    A cost model says so, which docs/scaling.md writes down: operations and bytes of a step are counted from the code,
    and a GPU reaches an assumed part of its data sheet. The assumptions are printed with the answer. Nothing here was
    run on a GPU; `varifocal bench plan` compares the model with this machine.

    \\b
    varifocal plan --preset qwen-134m --gpu a100 --gpus 8 --tokens 10B --context 2048
    varifocal plan -m dense -m head_gated --gpu h100 --gpus 16 --price 2.5
    varifocal plan --gpu 4090 --gpus 1 --context 8192 --checkpointing
    varifocal plan --preset tiny --gpu this-machine --gpus 1 --tokens 5M --batch 16
    varifocal plan --papers
    """
    if json_file is not None:
        require_folder(json_file)
    from varifocal.model import preset as preset_config
    from varifocal.plan.hardware import Assumptions
    from varifocal.plan.plan import Training, find_variants, predict

    given = Assumptions()
    here = gpu.lower() in ("this-machine", "cpu")
    if here and precision == "bfloat16":
        precision = "float32"
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"unknown precision {precision!r}; known are float32, bfloat16")
    hardware = find_hardware(gpu, calibration)
    console = Console()
    if papers:
        print_papers(console, hardware, gpus=gpus, context=context)
        return
    found: dict[str, Prediction] = {}
    training: Training | None = None
    for name, (stem, options) in find_variants(mechanism).items():
        if here and mechanism is None and name not in hardware.attention:
            continue
        config = preset_config(
            preset,
            mechanism=stem,
            mechanism_options=options,
            **({} if context is None else {"max_position_embeddings": context}),
        )
        training = Training(
            config=config,
            tokens=parse_count(tokens),
            length=config.max_position_embeddings,
            batch=batch,
            devices=gpus,
            micro_batch=micro_batch,
            precision="bfloat16" if precision == "bfloat16" else "float32",
            checkpointing=checkpointing,
        )
        found[name] = predict(training, hardware, given, price=price)
    assert training is not None
    print_predictions(console, preset, training, hardware, found, price=price)
    print_assumptions(console, hardware, given)
    if json_file is not None:
        write_atomically(json_file, json.dumps(as_json(training, hardware, given, found), indent=1) + "\n")


def find_hardware(name: str, calibration: Path | None) -> Hardware:
    """A GPU of the table, or this machine as it is measured now or was measured for a file."""
    from varifocal.plan.hardware import Hardware, find_gpu

    if name.lower() not in ("this-machine", "cpu"):
        if calibration is not None:
            raise ValueError(f"--calibration is for --gpu this-machine, got --gpu {name}")
        return find_gpu(name)
    if calibration is not None:
        from varifocal.report.plan_check import read_plan_check

        return Hardware(**read_plan_check(calibration)["machine"])
    from varifocal.bench.plan.calibration import calibrate

    with Console(stderr=True).status("measuring this machine"):
        return calibrate()


def print_predictions(
    console: Console,
    preset: str,
    training: Training,
    hardware: Hardware,
    found: dict[str, Prediction],
    *,
    price: float | None,
) -> None:
    """What each mechanism takes, its memory by part, and what does not fit."""
    base = found.get("dense") or next(iter(found.values()))
    rows = [["mechanism", "parameters", "GFLOPs a token", "rows at once", "GB", "tokens/s", "speed", "hours", "cost"]]
    for name, one in found.items():
        rows.append(
            [
                name,
                f"{one.parameters:,}",
                f"{one.flops / 1e9:.2f}",
                str(one.micro_batch),
                f"{one.peak / 1e9:.1f}{'' if one.fits else ' !'}",
                f"{one.tokens_per_second:,.0f}" if one.fits else "",
                f"{one.tokens_per_second / base.tokens_per_second:.2f}x" if one.fits else "",
                f"{one.hours:,.1f}" if one.fits else "",
                ("" if one.cost is None else f"${one.cost:,.0f}") if one.fits else "does not fit",
            ]
        )
    devices = f"{training.devices} x {hardware.name}"
    print_table(
        console,
        f"{preset}, {training.tokens:,.0f} tokens in rows of {training.length}, {training.batch} rows a step, "
        f"{training.precision}, {devices}",
        rows,
    )
    parts = list(base.memory)
    memory = [["GB of each device", *parts, "all", "room"]]
    memory += [
        [name, *(f"{one.memory[part] / 1e9:.2f}" for part in parts), f"{one.peak / 1e9:.2f}", f"{one.room / 1e9:.1f}"]
        for name, one in found.items()
    ]
    print_table(console, "memory by part", memory)
    times = [["seconds of a step", *base.seconds, "all"]]
    times += [
        [name, *(f"{value:.3g}" for value in one.seconds.values()), f"{one.step_seconds:.3g}"]
        for name, one in found.items()
    ]
    print_table(console, "time by part", times)
    for name, one in found.items():
        if not one.fits:
            remedy = "a GPU with more memory" if training.checkpointing else "--checkpointing or a GPU with more memory"
            smaller = "a smaller --micro-batch, " if one.micro_batch > 1 else ""
            console.print(
                f"[bold red]{name} does not fit:[/bold red] {one.micro_batch} rows at once take {one.peak / 1e9:.1f} "
                f"GB, there are {one.room / 1e9:.1f}; try {smaller}{remedy}",
                highlight=False,
                soft_wrap=True,
            )
    for note in base.notes:
        console.print(f"[dim]dense: {note}[/dim]", highlight=False, soft_wrap=True)
    if price is None and hardware.price is not None:
        console.print(
            f"[dim]${hardware.price:.2f} an hour of one {hardware.name} is an assumption; set yours with --price[/dim]",
            highlight=False,
        )


def print_assumptions(console: Console, hardware: Hardware, given: Assumptions) -> None:
    """Everything that is believed and was not counted."""
    rates = ", ".join(f"{name} {value / 1e12:.4g} TFLOP/s" for name, value in hardware.products.items())
    source = "measured here" if hardware.measured else "data sheet"
    console.print(
        f"[bold]{hardware.name}[/bold] ({source}): {rates}; {hardware.bandwidth / 1e9:,.0f} GB/s; "
        f"{hardware.exponentials / 1e9:,.3g}e9 exponentials/s; {hardware.memory / 1e9:.0f} GB",
        highlight=False,
        soft_wrap=True,
    )
    if hardware.measured:
        return
    told = ", ".join(f"{one.name} {getattr(given, one.name):g}" for one in fields(given))
    console.print(
        f"[bold]assumed[/bold] (docs/scaling.md; nothing here was run on a GPU): {told}",
        highlight=False,
        soft_wrap=True,
    )


def as_json(training: Training, hardware: Hardware, given: Assumptions, found: dict[str, Prediction]) -> dict[str, Any]:
    """The predictions and all they rest on, as plain values."""
    wanted = {one.name: getattr(training, one.name) for one in fields(training) if one.name != "config"}
    return {
        "training": wanted,
        "hardware": asdict(hardware),
        "assumptions": asdict(given),
        "predictions": {
            name: asdict(one) | {"peak": one.peak, "fits": one.fits, "step_seconds": one.step_seconds}
            for name, one in found.items()
        },
    }


def print_papers(console: Console, hardware: Hardware, *, gpus: int, context: int | None) -> None:
    """The papers' orders of memory and speed beside the arithmetic's, for our kernels and for prototypes."""
    from varifocal.plan.paper_order import order_checks
    from varifocal.plan.paper_plan import WAYS, paper_predictions
    from varifocal.results.papers import paper_tables

    for table in paper_tables():
        if table.memory is None and table.speed is None and table.time is None:
            continue
        names = tuple(row.mechanism for row in table.rows)
        checks = {
            way: order_checks(table, paper_predictions(way, names, hardware, gpus=gpus, context=context))
            for way in WAYS
        }
        for number, check in enumerate(checks[WAYS[0]]):
            rows = [[check.quantity, "paper", *WAYS]]
            for place, row in enumerate(check.rows):
                ours = [f"{checks[way][number].rows[place].predicted:.2f}x" for way in WAYS]
                rows.append([f"{row.method} ({row.mechanism})", f"{row.paper:.2f}x", *ours])
            print_table(console, f"{table.name}: {check.quantity}, baseline = 1", rows)
            for way in WAYS:
                sentences = checks[way][number].disagreements
                for sentence in sentences:
                    console.print(f"[yellow]{way}:[/yellow] {sentence}", highlight=False, soft_wrap=True)
                if not sentences:
                    console.print(f"[green]{way}:[/green] the paper's order", highlight=False)
