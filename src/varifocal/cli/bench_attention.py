"""varifocal bench attention: our attention beside torch's and that of other installed packages."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from varifocal.bench.attention.contenders import BASELINE
from varifocal.bench.attention.run import Plan, bench_attention, find_passes
from varifocal.bench.attention.workload import Workload
from varifocal.cli.options import (
    JsonFile,
    Memory,
    Plot,
    Rounds,
    TextLengths,
    Threads,
    parse_lengths,
    require_plots,
)
from varifocal.cli.tables import print_table, send_back, shown_steps
from varifocal.device import find_device, find_dtype
from varifocal.environment import place_and_versions
from varifocal.report.attention_bench import memory_table, speedup_table
from varifocal.report.from_gpus import bench_line
from varifocal.results.attention_bench import AttentionBench
from varifocal.results.files import require_folder
from varifocal.threads import use_threads

Passes = Annotated[
    str,
    typer.Option("--pass", help="forward, training (with the backward pass) or decode (one token); or several: a,b."),
]
Contenders = Annotated[
    list[str] | None, typer.Option("--contender", "-c", help="A row of the table; repeat for several. Default: all.")
]
MemoryAt = Annotated[
    str | None, typer.Option(help="Lengths at which memory is measured, in a run of each contender. Default: all.")
]


def attention(
    lengths: TextLengths = "512,1024,2048,4096,8192",
    kind: Passes = "training",
    contender: Contenders = None,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 12,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key and value heads.")] = 6,
    head_width: Annotated[int, typer.Option(min=1, help="Width of a head.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Rows in the batch.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    threads: Threads = None,
    rounds: Rounds = 5,
    memory: Memory = True,
    memory_at: MemoryAt = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short texts and few rounds, within minutes.")] = False,
    json_file: JsonFile = None,
    plot: Plot = None,
) -> None:
    """Time our attention beside torch's and that of other installed packages, on the same inputs, taking turns.

    Speeds are ratios to torch's causal scaled_dot_product_attention in the same run. A contender that does not agree
    with the float64 reference, outputs and gradients, is not timed. The result file is made for `results/`.

    [bold]Examples[/bold]

    varifocal bench attention --quick

    varifocal bench attention -c head_gated -c local --lengths 1024,4096 --pass forward,decode --threads 2
    """
    require_folder(json_file)
    require_folder(plot)
    require_plots(plot)
    names, passes = tuple(contender or ()) or None, find_passes(kind)
    probed = parse_lengths(memory_at) if memory_at else None if memory else ()
    plan = Plan(lengths=parse_lengths(lengths), passes=passes, names=names, rounds=rounds, memory_lengths=probed)
    if quick:
        plan = Plan.quick(passes, names)
    workload = Workload(
        length=plan.lengths[-1], batch=batch, heads=heads, kv_heads=kv_heads, head_width=head_width,
        dtype=find_dtype(dtype), device=find_device(device).place,
    )  # fmt: skip
    use_threads(threads)
    with shown_steps() as show:
        result = bench_attention(plan, workload, on_step=lambda step: show(step.doing, step.done, step.total))
    print_result(Console(), result)
    if workload.device.type != "cpu":
        send_back(bench_line(result, where=place_and_versions(workload.device)))
    if json_file is not None:
        result.write(json_file)
    if plot is not None:
        from varifocal.report.attention_bench_plot import plot_attention_bench

        plot_attention_bench(result, plot, kind=plan.passes[0])


def print_result(console: Console, result: AttentionBench) -> None:
    """Print tables of speed and memory, what was not timed and why, and the machine."""
    for kind in result.passes():
        print_table(console, f"{kind}: speed, {BASELINE} = 1", speedup_table(result, kind))
        if any(row.peak_bytes for row in result.of(kind)):
            print_table(console, f"{kind}: peak additional memory in MB (and as a ratio)", memory_table(result, kind))
    for name, fault in result.faults.items():
        console.print(f"[bold red]not timed:[/bold red] {name}: {fault}", highlight=False)
    for name in result.unchecked:
        console.print(f"[dim]{name} computes something else: timed, but not checked[/dim]", highlight=False)
    shared = result.environment
    console.print(
        f"{shared.processor}, {shared.threads} threads, torch {shared.torch}, matrix products "
        f"{result.matmul_gflops:.0f} GFLOP/s"
    )
