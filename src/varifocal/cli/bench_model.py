"""varifocal bench model: training steps and decoding beside Hugging Face's model on the same weights."""

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
from varifocal.device import find_device
from varifocal.report.model_bench import model_table, read_model_bench


def model(
    preset: Annotated[
        str, typer.Option(help="A preset; `varifocal info --preset NAME` shows its sizes.")
    ] = "qwen-134m",
    lengths: Annotated[str, typer.Option(help="Lengths of the text, separated by commas.")] = "2048,8192",
    contender: Annotated[
        list[str] | None,
        typer.Option("--contender", "-c", help="A row of the table beside the baselines; repeat for several."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows in the batch.")] = 1,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Fewer layers than the preset's, to try things out.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    precision: Annotated[
        str, typer.Option(help="float32; or bfloat16: float32 weights, narrow products, as in training.")
    ] = "float32",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's choice.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which all take turns.")] = 3,
    memory: Annotated[bool, typer.Option(help="Measure peak memory too, each in a process of its own.")] = True,
    memory_of: Annotated[
        Path | None,
        typer.Option(help="Only measure the memory of the rows of this result file that have none, and add it there."),
    ] = None,
    decode: Annotated[int, typer.Option(min=0, help="Tokens to decode behind each text; 0 for none.")] = 16,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result to this file.", dir_okay=False)
    ] = None,
) -> None:
    """A training step (forward, backward, AdamW) and decoding, beside Hugging Face's Qwen3 on the same weights.

    All take turns in one run. Speeds and memory are ratios to Qwen3 with torch's scaled_dot_product_attention and its
    own loss; a second baseline has our loss under its layers, so that what remains is the attention. Where Qwen3's
    loss would not fit into memory, the second one stands in, and a note says so.

    \\b
    varifocal bench model --preset tiny --lengths 256
    varifocal bench model --threads 2 --json results/model_bench.json
    varifocal bench model --device cuda --precision bfloat16 --batch 8
    """
    if json_file is not None:
        require_folder(json_file)
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"unknown precision {precision!r}; known are float32, bfloat16")
    find_device(device)
    from varifocal.bench.model.run import Plan, Step, add_memory, bench_model

    if threads is not None:
        torch.set_num_threads(threads)
    if memory_of is not None:
        content = read_model_bench(memory_of)
        known = Plan(
            preset=content["preset"],
            lengths=measured_lengths(content),
            batch=content["batch"],
            layers=layers,
            device=device,
            precision=content.get("precision", "float32"),
        )
        with progress_bar() as progress:
            task = progress.add_task("starting", total=None)
            add_memory(content, known, on_step=lambda doing: progress.update(task, description=doing))
        write_atomically(memory_of, json.dumps(content, indent=1) + "\n")
        print_result(content)
        return
    plan = Plan(
        preset=preset,
        lengths=parse_lengths(lengths),
        batch=batch,
        names=tuple(contender) if contender else None,
        layers=layers,
        rounds=rounds,
        memory=memory,
        decode=decode,
        device=device,
        precision="bfloat16" if precision == "bfloat16" else "float32",
    )
    with progress_bar() as progress:
        task = progress.add_task("starting", total=None)

        def show(step: Step) -> None:
            progress.update(task, description=step.doing, completed=step.done, total=step.total)

        content = bench_model(plan, on_step=show)
    print_result(content)
    if json_file is not None:
        write_atomically(json_file, json.dumps(content, indent=1) + "\n")


def measured_lengths(content: dict[str, Any]) -> tuple[int, ...]:
    """The lengths of a result's rows."""
    return tuple(sorted({row["length"] for row in content["rows"]}))


def print_result(content: dict[str, Any]) -> None:
    """A table for each pass, notes, and where it was measured."""
    console = Console()
    for kind in dict.fromkeys(row["pass"] for row in content["rows"]):
        print_table(
            console, f"{kind}: {content['preset']}, ratios to {content['baseline']}", model_table(content, kind)
        )
    for note in content["notes"]:
        console.print(f"[dim]{note}[/dim]", highlight=False)
    shared = content["environment"]
    console.print(f"{shared['processor']}, {shared['threads']} threads, torch {shared['torch']}")
