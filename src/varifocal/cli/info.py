"""varifocal info: what this installation can do here, and what a model of a preset would cost."""

from __future__ import annotations

import platform
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

import varifocal
from varifocal.environment import processor
from varifocal.kernels.native import library
from varifocal.kernels.steps import product


def info(
    preset: Annotated[
        str | None, typer.Option(help="Show parameters, FLOPs and cache bytes of this preset with each mechanism.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="With --preset: tokens of a text. Default: the preset's context.")
    ] = None,
) -> None:
    """Show which backends run here and why others do not; or, with --preset, what a model costs.

    Without a backend for a problem, attention runs on the reference: correct, but slow and with memory for all pairs.

    [bold]Examples[/bold]

    varifocal info

    varifocal info --preset qwen-134m

    varifocal info --preset qwen-134m --length 32768
    """
    if preset is not None:
        print_preset(Console(), preset, length)
        return
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_row("varifocal", varifocal.__version__)
    table.add_row("python", platform.python_version())
    table.add_row("torch", f"{torch.__version__}, {torch.get_num_threads()} threads")
    table.add_row("processor", processor())
    table.add_row("products", f"{product.library()}, for large float32 matrices of a model on the CPU")
    table.add_row("native", native_status())
    table.add_row("flex", flex_status())
    table.add_row("reference", "runs: plain torch, any type and device; needs memory for all pairs")
    cuda = f"{torch.cuda.get_device_name()}" if torch.cuda.is_available() else "none here"
    table.add_row("cuda", cuda)
    table.add_row("mechanisms", ", ".join(varifocal.MECHANISMS))
    Console().print(table)


def native_status() -> str:
    """Which targets the native library runs, or why it is missing."""
    missing = library.why_missing()
    if missing is not None:
        return f"missing: {missing}"
    runnable = list(library.targets())
    running = next(name for name, index in library.targets().items() if index == library.target())
    return f"runs: {running} (also here: {', '.join(name for name in runnable if name != running) or 'none'})"


def flex_status() -> str:
    """What FlexAttention can do here."""
    if torch.cuda.is_available():
        return "runs: on cuda, forward and backward; on the CPU outputs only"
    return "outputs only, for checking: FlexAttention has no backward pass on a CPU, and there is no GPU here"


def print_preset(console: Console, name: str, length: int | None) -> None:
    """Print the parameters by part and, for each mechanism, its own, the work of a token and its bytes in the cache."""
    from varifocal.model import preset
    from varifocal.plan.cost import cache_size, flops_per_token, parameters_by_part

    dense = preset(name)
    length = dense.max_position_embeddings if length is None else length
    parts = parameters_by_part(dense)
    parameters = Table(title=f"{name}: parameters", box=box.SIMPLE_HEAD, pad_edge=False)
    parameters.add_column("part")
    parameters.add_column("parameters", justify="right")
    for part, count in parts.items():
        tied = " (tied to the embedding)" if part == "head" and not count else ""
        parameters.add_row(part + tied, f"{count:,}")
    parameters.add_row("all", f"{sum(parts.values()):,}")
    console.print(parameters)
    table = Table(title=f"each mechanism, {length} tokens", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("mechanism")
    for title in ("own parameters", "MFLOPs a token", "reading", "rating", "cache bytes a token", "cache, MB"):
        table.add_column(title, justify="right")
    for mechanism in varifocal.MECHANISMS:
        config = preset(name, mechanism=mechanism)
        flops, cache = flops_per_token(config, length), cache_size(config, length)
        table.add_row(
            mechanism,
            f"{parameters_by_part(config)['mechanism']:,}",
            *(f"{value / 1e6:,.1f}" for value in (flops.total, flops.reading, flops.rating)),
            f"{cache.per_token:,}",
            f"{cache.at_length / 1e6:.1f}",
        )
    console.print(table)
    console.print(
        "FLOPs are those of a forward pass, averaged over the text; training takes three times as many. Reading is "
        "attention to the keys that are read; rating decides which keys these are. The cache is in float32.",
        style="dim",
    )
