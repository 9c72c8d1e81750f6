"""varifocal bench plan: predicted and measured steps on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from varifocal.cli.options import JsonFile, Memory, Rounds, TextLengths, Threads, parse_lengths
from varifocal.cli.tables import print_table, shown_steps
from varifocal.device import CPU, Device, SharedCpu
from varifocal.report.plan_check import error_table, plan_table
from varifocal.results.files import require_folder
from varifocal.threads import use_threads

if TYPE_CHECKING:
    from varifocal.results.plan_check import PlanCheck

Contenders = Annotated[
    list[str] | None,
    typer.Option("--contender", "-c", help="A mechanism as `bench model` names them; repeat for several."),
]
Clock = Annotated[
    str, typer.Option(help="wall, or processor: the processor time of one thread, for a machine that others use too.")
]
MemoryOf = Annotated[
    Path | None,
    typer.Option(help="Only measure the memory of the rows of this result that have none, and predict all rows again."),
]


def plan(
    presets: Annotated[str, typer.Option(help="Presets, separated by commas.")] = "tiny,small,qwen-134m",
    lengths: TextLengths = "256,1024,2048",
    contender: Contenders = None,
    threads: Threads = None,
    clock: Clock = "wall",
    rounds: Rounds = 3,
    memory: Memory = True,
    memory_of: MemoryOf = None,
    json_file: JsonFile = None,
) -> None:
    """Compare the cost model of `varifocal plan` with this machine: predicted and measured step time and memory.

    The machine's rates are measured first, each by itself (a product, a copy, each mechanism's attention at one length,
    an operator with nothing to do); whole training steps are then predicted from them and measured.

    \b
    varifocal bench plan --presets tiny --lengths 256,512
    varifocal bench plan --threads 2 --json results/plan_check.json
    """
    require_folder(json_file)
    measured_by = find_clock(clock, threads)
    use_threads(threads)
    from varifocal.bench.plan.run import CheckPlan, bench_plan, measure_memory_of

    def save(found: PlanCheck) -> None:
        if json_file is not None:
            found.write(json_file)

    with shown_steps() as show:
        if memory_of is not None:
            found = measure_memory_of(memory_of, on_step=show)
        else:
            names = tuple(contender) if contender else CheckPlan.names
            check = CheckPlan(
                presets=tuple(part.strip() for part in presets.split(",")), lengths=parse_lengths(lengths),
                names=names, rounds=rounds, memory=memory,
            )  # fmt: skip
            found = bench_plan(check, clock=measured_by, on_step=show, on_rows=save)
            save(found)
    print_result(Console(), found)


def find_clock(name: str, threads: int | None) -> Device:
    """The clock of that name; ValueError if it is unknown or does not fit the number of threads."""
    if name not in ("wall", "processor"):
        raise ValueError(f"unknown clock {name!r}; known are wall, processor")
    if name == "processor" and threads != 1:
        raise ValueError("processor time adds up over threads; use --clock processor with --threads 1")
    return CPU if name == "wall" else SharedCpu()


def print_result(console: Console, found: PlanCheck) -> None:
    """Print every step, the errors, and the machine."""
    print_table(console, "a training step of one row: measured and predicted", plan_table(found))
    print_table(console, "errors of the predictions", error_table(found))
    shared, machine = found.environment, found.machine
    rates = f"{machine.products['float32'] / 1e9:.0f} GFLOP/s, {machine.bandwidth / 1e9:.1f} GB/s"
    console.print(f"{shared.processor}, {shared.threads} threads, torch {shared.torch}: {rates}")
