"""varifocal bench: speed and memory, side by side in one run."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer
from rich.console import Console

from varifocal.bench.attention.contenders import BASELINE
from varifocal.bench.attention.run import DTYPES, PASSES, Pass, Plan, Step, bench_attention
from varifocal.bench.attention.workload import Workload
from varifocal.cli.bench_model import model
from varifocal.cli.bench_plan import plan
from varifocal.cli.bench_training import training
from varifocal.cli.files import require_folder, write_atomically
from varifocal.cli.numbers import parse_lengths
from varifocal.cli.tables import print_table, progress_bar
from varifocal.device import find_device
from varifocal.report.attention_bench import AttentionBench, memory_table, speedup_table

bench = typer.Typer(no_args_is_help=True, help="Measure speed and memory, side by side in one run.")
bench.command()(model)
bench.command()(training)
bench.command()(plan)


@bench.callback()
def benchmarks() -> None:
    """Measure speed and memory, side by side in one run."""


@bench.command()
def attention(
    lengths: Annotated[str, typer.Option(help="Lengths of the text, separated by commas.")] = "512,1024,2048,4096,8192",
    kind: Annotated[
        str,
        typer.Option(
            "--pass", help="forward, training (forward and backward), decode (one token); or several, by commas."
        ),
    ] = "training",
    contender: Annotated[
        list[str] | None,
        typer.Option("--contender", "-c", help="A row of the table; repeat for several. Default: all."),
    ] = None,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 12,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key and value heads.")] = 6,
    head_width: Annotated[int, typer.Option(min=1, help="Width of a head.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Rows in the batch.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's choice.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which all take turns.")] = 5,
    memory: Annotated[bool, typer.Option(help="Measure peak memory too, each in a process of its own.")] = True,
    memory_at: Annotated[
        str | None, typer.Option(help="Lengths at which memory is measured; default: all. It takes a run of each.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short texts and ours only, within a minute.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result to this file.", dir_okay=False)
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it to this file, .png or .svg.", dir_okay=False)] = None,
) -> None:
    """Our attention beside torch's and that of installed peers, on the same inputs, taking turns.

    Speeds are ratios to torch's causal scaled_dot_product_attention in the same run. A contender that does not agree
    with the float64 reference, outputs and gradients, is not timed. The result file is made for `results/`.
    """
    for file in (json_file, plot):
        if file is not None:
            require_folder(file)
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib; install it with: pip install 'varifocal[plots]'")
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
    if heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
    place = find_device(device).place
    if threads is not None:
        torch.set_num_threads(threads)
    plan = Plan(
        lengths=parse_lengths("512,1024,2048" if quick else lengths),
        passes=parse_passes(kind),
        names=tuple(contender) if contender else None,
        rounds=2 if quick else rounds,
        memory_lengths=parse_lengths(memory_at) if memory_at else None if memory and not quick else (),
        seconds=3.0 if quick else 20.0,
    )
    workload = Workload(
        length=plan.lengths[-1],
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        dtype=DTYPES[dtype],
        device=place,
    )
    progress = progress_bar()
    with progress:
        task = progress.add_task("starting", total=None)

        def show(step: Step) -> None:
            progress.update(task, description=step.doing, completed=step.done, total=step.total)

        result = AttentionBench(bench_attention(plan, workload, on_step=show))
    print_result(Console(), result)
    if json_file is not None:
        write_atomically(json_file, json.dumps(result.content, indent=1) + "\n")
    if plot is not None:
        from varifocal.report.attention_bench_plot import plot_attention_bench

        plot_attention_bench(result, plot, kind=plan.passes[0])


@bench.command()
def data(
    folder: Annotated[
        Path | None, typer.Argument(metavar="DATA", help="A prepared data set. Default: random tokens.")
    ] = None,
    lengths: Annotated[str, typer.Option(help="Lengths of the rows, separated by commas.")] = "512,2048,8192",
    tokens: Annotated[int, typer.Option(min=1 << 16, help="Random tokens to make, without DATA.")] = 1 << 26,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which all take turns.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Batches of 65,536 tokens in a turn.")] = 32,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result to this file.", dir_okay=False)
    ] = None,
) -> None:
    """Reading alone, on one core: packed and shuffled rows beside a plain numpy memmap slice, which is the limit.

    Rows are compared with the slice before anything is timed. The files lie in the system's cache, as in training after
    the first epoch.

    [bold]Examples[/bold]

      varifocal bench data

      varifocal bench data data/sotu --lengths 1024 --json reading.json
    """
    from varifocal.bench.data.run import AIM, ReadingPlan, bench_data
    from varifocal.bench.data.synthetic import write_synthetic
    from varifocal.data import open_data
    from varifocal.report.data_bench import reading_table

    if json_file is not None:
        require_folder(json_file)
    plan = ReadingPlan(lengths=parse_lengths(lengths), rounds=rounds, steps=steps)
    console = Console()
    with TemporaryDirectory() as temporary, console.status("reading"):
        prepared = write_synthetic(Path(temporary) / "data", tokens=tokens) if folder is None else open_data(folder)
        result = bench_data(prepared, plan)
    print_table(console, "million tokens a second on one core (and as a ratio)", reading_table(result))
    console.print(f"{result['environment']['processor']}; the aim is {AIM / 1e6:.0f}", highlight=False)
    if json_file is not None:
        write_atomically(json_file, json.dumps(result, indent=1) + "\n")


def parse_passes(text: str) -> tuple[Pass, ...]:
    """Names of passes, separated by commas."""
    chosen = tuple(known for known in PASSES if known in text.split(","))
    if len(chosen) != len(text.split(",")):
        raise ValueError(f"--pass takes {', '.join(PASSES)}, separated by commas; got {text!r}")
    return chosen


def print_result(console: Console, result: AttentionBench) -> None:
    """Tables of speed and memory, what was not timed and why, and where it was measured."""
    for kind in result.passes():
        print_table(console, f"{kind}: speed, {BASELINE} = 1", speedup_table(result, kind))
        if any(row["peak_bytes"] for row in result.content["rows"] if row["pass"] == kind):
            print_table(console, f"{kind}: peak additional memory in MB (and as a ratio)", memory_table(result, kind))
    for name, fault in result.content["faults"].items():
        console.print(f"[bold red]not timed:[/bold red] {name}: {fault}", highlight=False)
    for name in result.content["unchecked"]:
        console.print(f"[dim]{name} has a method of its own: timed, not compared[/dim]", highlight=False)
    shared = result.content["environment"]
    gflops = f"{result.content['matmul_gflops']:.0f} GFLOP/s"
    console.print(
        f"{shared['processor']}, {shared['threads']} threads, torch {shared['torch']}, matrix products {gflops}"
    )
