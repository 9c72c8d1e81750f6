"""varifocal data: documents to tokens, what they are like, and questions to probe attention with."""

from __future__ import annotations

import typer

from varifocal.cli.data_inspect import inspect
from varifocal.cli.data_prepare import prepare
from varifocal.cli.data_probe import probe

data = typer.Typer(no_args_is_help=True, help="Make data sets of tokens, look at them, make questions for attention.")
for verb in (prepare, inspect, probe):
    data.command()(verb)


@data.callback()
def data_sets() -> None:
    """Make data sets of tokens, look at them, make questions for attention."""
