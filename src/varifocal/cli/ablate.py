"""varifocal ablate: what each part of a mechanism is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from varifocal.cli.compare import Seeds, Settings, Workers, parse_seeds, require_packages, run_and_report


def ablate(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="A config as for compare; the mechanisms it lists are ignored."),
    ] = None,
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="The folder of the comparison.")] = None,
    ablation: Annotated[
        list[str] | None,
        typer.Option(
            "--ablation", "-a", help="A name from --list, or a mechanism for all its ablations; repeat for several."
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List all ablations and exit.")] = False,
    set_: Settings = None,
    seeds: Seeds = None,
    workers: Workers = 1,
) -> None:
    """Take a mechanism apart: the papers' ablations and those they leave open, by name.

    Each one is trained as in compare, beside dense attention and the full mechanism; the tables give its difference
    from both. Without --ablation, all of them run.

    [bold]Examples[/bold]

      varifocal ablate --list

      varifocal ablate configs/compare.toml runs/gates -a head_gated.no_gate -a head_gated.static_gate --seeds 0,1,2

      varifocal ablate configs/compare.toml runs/asga -a sparse_geometric
    """
    if list_:
        print_ablations()
        return
    if config is None or out is None:
        raise ValueError("ablate needs a CONFIG and a folder OUT; 'varifocal ablate --list' shows the ablations")
    require_packages()
    from varifocal.experiments.ablate import load_ablation_plan

    plan = load_ablation_plan(config, ablation or [], set_ or [], seeds=parse_seeds(seeds))
    run_and_report(plan, out, workers=workers)


def print_ablations() -> None:
    """Print the name and the question of every ablation."""
    from varifocal.experiments.ablations import every_ablation

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("ablation", no_wrap=True)
    table.add_column("what it asks")
    for one in every_ablation().values():
        table.add_row(one.name, one.question)
    Console().print(table)
