"""Options that several verbs share, and how they are parsed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

ANY_MODEL = "A run, a model's folder, or a pretrained Qwen3, Qwen2 or Llama (folder, .gguf, hub name; or smollm2)."
"""What a verb says that opens models of all kinds."""
MOST_SEED = (1 << 32) - 1
"""What every generator of random numbers takes."""
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: torch's own number.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result to this file.", dir_okay=False)]
Plot = Annotated[Path | None, typer.Option(help="Draw the result to this file (.png or .svg).", dir_okay=False)]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds; in each, all contenders take turns.")]
Memory = Annotated[bool, typer.Option(help="Also measure peak memory, each in its own process.")]
TextLengths = Annotated[str, typer.Option(help="Lengths of the texts, separated by commas.")]
WeightsKind = Annotated[
    str | None,
    typer.Option(
        "--weights", help="float32; or int8 with a scale for each 32, a quarter of the memory. Default: as saved."
    ),
]
Preset = Annotated[str, typer.Option(help="A preset; `varifocal info --preset NAME` shows its sizes.")]


def require_plots(plot: Path | None) -> None:
    """ValueError if a picture was asked for but cannot be drawn."""
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib; install it with: pip install 'varifocal[plots]'")


def parse_lengths(text: str) -> tuple[int, ...]:
    """The lengths in a text such as 512,1024, sorted: whole numbers of at least 1."""
    lengths = tuple(sorted(set(parse_numbers(text, what="lengths"))))
    if lengths[0] < 1:
        raise ValueError(f"lengths must be at least 1, got {text!r}")
    return lengths


def parse_numbers(text: str, *, what: str) -> tuple[int, ...]:
    """The whole numbers in a text such as 0,1,2."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"{what} must be whole numbers separated by commas, got {text!r}") from error


def parse_count(text: str) -> float:
    """The value of a text such as 250000, 3.3B, 500M or 1e9."""
    units = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
    digits, unit = (text[:-1], units[text[-1].lower()]) if text[-1:].lower() in units else (text, 1.0)
    try:
        count = float(digits.replace("_", "")) * unit
    except ValueError as error:
        raise ValueError(f"expected a number such as 500M, 10B or 250000, got {text!r}") from error
    if not 0 < count < float("inf"):
        raise ValueError(f"expected a finite number above 0, got {text!r}")
    return count
