"""varifocal bench model: training steps and decoding beside Hugging Face's model on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from varifocal.cli.options import JsonFile, Memory, Preset, Rounds, TextLengths, Threads, parse_lengths
from varifocal.cli.tables import print_table, shown_steps
from varifocal.device import find_device
from varifocal.report.model_bench import model_table
from varifocal.results.files import require_folder
from varifocal.threads import use_threads

if TYPE_CHECKING:
    from varifocal.results.model_bench import ModelBench

Contenders = Annotated[
    list[str] | None,
    typer.Option("--contender", "-c", help="A row of the table beside the baselines; repeat for several."),
]
Layers = Annotated[int | None, typer.Option(min=1, help="Fewer layers than the preset's, to try things out.")]
Precision = Annotated[str, typer.Option(help="float32; or bfloat16 for the products alone, as in training.")]
MemoryOf = Annotated[
    Path | None,
    typer.Option(help="Only measure the memory of the rows of this result file that have none, and add it there."),
]


def model(
    preset: Preset = "qwen-134m",
    lengths: TextLengths = "2048,8192",
    contender: Contenders = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows in the batch.")] = 1,
    layers: Layers = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    precision: Precision = "float32",
    threads: Threads = None,
    rounds: Rounds = 3,
    memory: Memory = True,
    memory_of: MemoryOf = None,
    decode: Annotated[int, typer.Option(min=0, help="Tokens to decode after each text; 0 for none.")] = 16,
    json_file: JsonFile = None,
) -> None:
    """Time a training step (forward, backward, AdamW) and decoding beside Hugging Face's Qwen3 on the same weights.

    All contenders take turns in one run. Speeds and memory are ratios to Qwen3 with torch's
    scaled_dot_product_attention and its own loss. A second baseline has our loss after Qwen3's layers, so that only the
    attention differs. Where Qwen3's own loss would not fit into memory, the second baseline takes its place, and a note
    says so.

    \b
    varifocal bench model --preset tiny --lengths 256
    varifocal bench model --threads 2 --json results/model_bench.json
    varifocal bench model --device cuda --precision bfloat16 --batch 8
    """
    require_folder(json_file)
    from varifocal.plan.hardware import find_precision

    products = find_precision(precision)
    find_device(device)
    from varifocal.bench.model.run import Plan, bench_model, measure_memory_of

    use_threads(threads)
    with shown_steps() as show:
        if memory_of is not None:
            found = measure_memory_of(memory_of, layers=layers, device=device, on_step=show)
        else:
            plan = Plan(
                preset=preset, lengths=parse_lengths(lengths), batch=batch, names=tuple(contender or ()) or None,
                layers=layers, rounds=rounds, memory=memory, decode=decode, device=device, precision=products,
            )  # fmt: skip
            found = bench_model(plan, on_step=lambda step: show(step.doing, step.done, step.total))
            if json_file is not None:
                found.write(json_file)
    print_result(Console(), found)


def print_result(console: Console, bench: ModelBench) -> None:
    """Print a table for each pass, the notes, and the machine."""
    for kind in dict.fromkeys(row.kind for row in bench.rows):
        print_table(console, f"{kind}: {bench.preset}, ratios to {bench.baseline}", model_table(bench, kind))
    for note in bench.notes:
        console.print(f"[dim]{note}[/dim]", highlight=False)
    shared = bench.environment
    console.print(f"{shared.processor}, {shared.threads} threads, torch {shared.torch}")
