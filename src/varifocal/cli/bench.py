"""varifocal bench: speed and memory, side by side in one run."""

from __future__ import annotations

import typer

from varifocal.cli.bench_attention import attention
from varifocal.cli.bench_data import data
from varifocal.cli.bench_decode import decode
from varifocal.cli.bench_model import model
from varifocal.cli.bench_plan import plan
from varifocal.cli.bench_serving import serving
from varifocal.cli.bench_training import training
from varifocal.cli.verb import Verb, Verbs

bench = typer.Typer(cls=Verbs, no_args_is_help=True, help="Measure speed and memory, side by side in one run.")
for benchmark in (model, decode, serving, training, plan, attention, data):
    bench.command(cls=Verb)(benchmark)


@bench.callback()
def benchmarks() -> None:
    """Measure speed and memory, side by side in one run."""
