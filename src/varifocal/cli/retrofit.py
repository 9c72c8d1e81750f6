"""varifocal retrofit: adaptive attention for a pretrained model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from varifocal.cli.files import require_folder, write_atomically
from varifocal.environment import environment


def retrofit(
    source: Annotated[
        str,
        typer.Argument(
            help="A folder or hub name with safetensors, or a .gguf file: Qwen3, Qwen2, Llama.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Argument(help="The new folder, for the model and its tokenizer.", show_default=False)],
    mechanism: Annotated[str, typer.Option("--mechanism", "-m", help="The mechanism for every layer.")],
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", help="An option of it, as window=128 or gate.start=-4; repeat for several."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="The longest text that is to start as it was. Default: the model's own, up to 2048."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text in UTF-8 to measure on, and with --adapt to train on.", dir_okay=False)
    ] = None,
    validate: Annotated[
        Path | None, typer.Option(help="Another text, to measure on in place of --text.", dir_okay=False)
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="How many texts of --context tokens to measure on.")] = 4,
    adapt: Annotated[int, typer.Option(min=0, help="Steps of training on --text before it is saved.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Texts of --context tokens in a step.")] = 1,
    rate: Annotated[float, typer.Option(help="Learning rate of --adapt.")] = 1e-4,
    mechanism_rate: Annotated[float, typer.Option(help="Learning rate of the mechanism's own parameters.")] = 1e-3,
    seed: Annotated[int, typer.Option(min=0, help="Of the mechanism's new parameters.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's choice.")] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Add what was measured to the runs in this file.", dir_okay=False),
    ] = None,
) -> None:
    """Give a pretrained model adaptive attention, starting as the dense model where the mechanism can.

    Gates start closed to the new branch, scales start neutral; what is promised is printed, and with --text measured
    against the source. A folder that exists is never touched.

    [bold]Examples[/bold]

    varifocal retrofit Qwen/Qwen3-0.6B qwen-gated --mechanism head_gated --option window=256

    varifocal retrofit smollm2.gguf small-local -m local -o window=128 --context 1024 --text train.txt --validate
    valid.txt --adapt 100 --json results.json
    """
    require_model_extra()
    from varifocal.retrofit.adaptation import Adaptation, mean_loss, measure_distance, read_rows
    from varifocal.retrofit.adaptation import adapt as adapt_model
    from varifocal.retrofit.retrofit import refuse_existing, save_model
    from varifocal.retrofit.retrofit import retrofit as retrofit_model

    refuse_existing(out)
    if json_file is not None:
        require_folder(json_file)
    read_runs(json_file)
    for file in (text, validate):
        if file is not None and not file.is_file():
            raise ValueError(f"{file} does not exist; give a text file in UTF-8")
    if adapt and text is None:
        raise ValueError(f"--adapt {adapt} needs a text to train on; give one with --text")
    measured = text if validate is None else validate
    if json_file is not None and measured is None:
        raise ValueError("--json needs something to measure on; give a text with --text or --validate")
    plan = Adaptation(steps=adapt, batch=batch, rate=rate, mechanism_rate=mechanism_rate) if adapt else None
    if threads is not None:
        torch.set_num_threads(threads)
    console = Console(soft_wrap=True, highlight=False)
    options = parse_options(option or [])
    made = retrofit_model(source, mechanism=mechanism, options=options, context=context, dtype=torch.float32, seed=seed)
    console.print(f"{made.source.config.model_type} {source}: {mechanism} {json.dumps(made.options)}")
    console.print(made.promise())
    run: dict[str, Any] = {
        "mechanism": mechanism,
        "asked": options,
        "options": made.options,
        "context": made.context,
        "share": made.share,
        "seed": seed,
    }
    if measured is not None:
        if made.tokenizer is None:
            raise ValueError(f"{source} has no tokenizer, so a text cannot be measured; leave --text out")
        known = read_rows(measured, made.tokenizer, length=made.context, most=rows)
        distance = measure_distance(made.source, made.model, known)
        console.print(
            f"{known.numel()} tokens of {measured}: loss of the source {distance.first_loss:.4f}, of the new model "
            f"{distance.second_loss:.4f}, largest logit difference {distance.largest_logit_difference:.1e}"
        )
        run |= {
            "text": measured.name,
            "tokens": known.numel(),
            "source_loss": distance.first_loss,
            "loss_before": distance.second_loss,
            "largest_logit_difference": distance.largest_logit_difference,
        }
        if plan is not None and text is not None:
            lines = read_rows(text, made.tokenizer, length=made.context, most=plan.steps * plan.batch)
            progress = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), transient=True
            )
            with progress:
                task = progress.add_task("adapting", total=plan.steps)

                def show(step: int, loss: float) -> None:
                    progress.update(task, completed=step, description=f"adapting, loss {loss:.3f}")

                losses = adapt_model(made.model, lines, plan, on_step=show)
            after = mean_loss(made.model, known)
            console.print(f"after {plan.steps} steps of {plan.batch} x {made.context} tokens: loss {after:.4f}")
            run |= {
                "adaptation": {"steps": adapt, "batch": batch, "rate": rate, "mechanism_rate": mechanism_rate},
                "training_text": text.name,
                "training_losses": losses,
                "loss_after": after,
            }
    save_model(made.model, out, tokenizer=made.tokenizer)
    console.print(f"saved {out}")
    if json_file is not None:
        run["environment"] = environment()
        # Read again, for others may have written meanwhile. A run of the same mechanism and options is replaced.
        kept = [one for one in read_runs(json_file) if (one["mechanism"], one["asked"]) != (mechanism, options)]
        write_atomically(json_file, json.dumps({"experiment": "retrofit", "runs": [*kept, run]}, indent=1) + "\n")


def require_model_extra() -> None:
    """ValueError if what the model needs is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("this command needs transformers; install it with: pip install 'varifocal[model]'")


def read_runs(file: Path | None) -> list[dict[str, Any]]:
    """The runs of a result file of this command; none if it does not exist yet."""
    if file is None or not file.exists():
        return []
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read {file} as a result file: {error}") from error
    if not isinstance(content, dict) or content.get("experiment") != "retrofit":
        raise ValueError(f"{file} is not a result of 'varifocal retrofit'; give another name")
    runs: list[dict[str, Any]] = content["runs"]
    return runs


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
