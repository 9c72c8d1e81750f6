"""varifocal retrofit: adaptive attention for a pretrained model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from varifocal.cli.options import MOST_SEED, Threads, WeightsKind
from varifocal.cli.tables import counting_bar
from varifocal.threads import use_threads

Source = Annotated[
    str,
    typer.Argument(
        help="A folder or hub name with safetensors, or a .gguf file: Qwen3, Qwen2, Llama.", show_default=False
    ),
]
Out = Annotated[Path, typer.Argument(help="The new folder, for the model and its tokenizer.", show_default=False)]
MechanismOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        help="An option of the mechanism, such as window=128 or gate.start=-4; repeat for several.",
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        min=1, help="The longest text on which the model must start as it was. Default: its own context, up to 2048."
    ),
]
Text = Annotated[
    Path | None, typer.Option(help="A text in UTF-8 to measure on and, with --adapt, to train on.", dir_okay=False)
]
Validate = Annotated[Path | None, typer.Option(help="Another text to measure on, instead of --text.", dir_okay=False)]
RunsFile = Annotated[
    Path | None, typer.Option("--json", help="Add what was measured to the runs in this file.", dir_okay=False)
]


def retrofit(
    source: Source,
    out: Out,
    mechanism: Annotated[str, typer.Option("--mechanism", "-m", help="The mechanism for every layer.")],
    option: MechanismOptions = None,
    context: Context = None,
    text: Text = None,
    validate: Validate = None,
    rows: Annotated[int, typer.Option(min=1, help="How many texts of --context tokens to measure on.")] = 4,
    adapt: Annotated[int, typer.Option(min=0, help="Training steps on --text before the model is saved.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Texts of --context tokens per step.")] = 1,
    rate: Annotated[float, typer.Option(help="Learning rate of --adapt.")] = 1e-4,
    mechanism_rate: Annotated[float, typer.Option(help="Learning rate of the mechanism's own parameters.")] = 1e-3,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Seed of the mechanism's new parameters.")] = 0,
    weights: WeightsKind = None,
    threads: Threads = None,
    json_file: RunsFile = None,
) -> None:
    """Give a pretrained model adaptive attention, starting as the dense model where the mechanism can.

    Gates start closed to the new branch, and scales start neutral. The command prints what this start promises and,
    with --text, measures it against the source. It never touches a folder that exists.

    [bold]Examples[/bold]

    varifocal retrofit smollm2 runs/gated --mechanism head_gated --option window=256

    varifocal retrofit smollm2 runs/local -m local --option window=128 --context 512 --text my.txt --adapt 20
    """
    require_model_extra()
    from varifocal.retrofit.adaptation import Adaptation
    from varifocal.retrofit.conversion import Conversion, convert

    plan = Adaptation(steps=adapt, batch=batch, rate=rate, mechanism_rate=mechanism_rate) if adapt else None
    wanted = Conversion(
        mechanism=mechanism, options=parse_options(option or []), context=context, text=text, validate=validate,
        rows=rows, adaptation=plan, seed=seed, weights=weights,
    )  # fmt: skip
    use_threads(threads)
    console = Console(soft_wrap=True, highlight=False)
    with counting_bar(console=console) as bar:
        task = bar.add_task("adapting", total=adapt, visible=bool(adapt))

        def show(step: int, loss: float) -> None:
            bar.update(task, completed=step, description=f"adapting, loss {loss:.3f}")

        convert(source, out, wanted, result=json_file, say=console.print, on_step=show)


def require_model_extra() -> None:
    """ValueError unless the packages of the extra `model` are installed."""
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("this command needs transformers; install it with: pip install 'varifocal[model]'")


def parse_options(given: list[str]) -> dict[str, Any]:
    """{"window": 128, "gate": {"start": -4}} from ["window=128", "gate.start=-4"]; values are JSON, or words."""
    options: dict[str, Any] = {}
    for one in given:
        name, equals, value = one.partition("=")
        *outer, last = name.split(".")
        if not equals or not all((*outer, last)) or len(outer) > 1:
            raise ValueError(f"an option is given as name=value or gate.name=value, got {one!r}")
        place = options
        for part in outer:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ValueError(f"option {part!r} is given as a value and as {name!r}; give one of them")
        try:
            place[last] = json.loads(value)
        except json.JSONDecodeError:
            place[last] = value
    return options
