"""varifocal data: prepares data sets of tokens, inspects them, and makes questions that probe attention."""

from __future__ import annotations

import typer

from varifocal.cli.data_inspect import inspect
from varifocal.cli.data_pairs import pairs
from varifocal.cli.data_prepare import prepare
from varifocal.cli.data_probe import probe
from varifocal.cli.verb import Verb, Verbs

data = typer.Typer(
    cls=Verbs, no_args_is_help=True, help="Prepare data sets of tokens, inspect them, and probe attention."
)
for verb in (prepare, inspect, probe, pairs):
    data.command(cls=Verb)(verb)


@data.callback()
def data_sets() -> None:
    """Prepare data sets of tokens, inspect them, and probe attention."""
