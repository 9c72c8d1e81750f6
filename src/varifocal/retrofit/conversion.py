"""Saves a pretrained model with another mechanism, measured against its source and adapted on request."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from varifocal.environment import environment
from varifocal.model.weights import check_kind, with_weights
from varifocal.results.files import require_folder
from varifocal.results.retrofit import AdaptationRecord, RetrofitResult, RetrofitRun
from varifocal.retrofit.adaptation import Adaptation, adapt, mean_loss, measure_distance, read_rows
from varifocal.retrofit.retrofit import Retrofitted, refuse_existing, retrofit, save_model

Say = Callable[[str], None]
OnStep = Callable[[int, float], None]


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Which mechanism, and what to measure and train on."""

    mechanism: str
    options: dict[str, Any] = field(default_factory=dict)
    context: int | None = None
    """The longest text on which the model must start as it was; None for the model's own context, up to 2048."""
    text: Path | None = None
    """A text in UTF-8 to measure on and to train on."""
    validate: Path | None = None
    """Another text to measure on, instead of `text`."""
    rows: int = 4
    """How many texts of `context` tokens to measure on."""
    adaptation: Adaptation | None = None
    seed: int = 0
    weights: str | None = None
    """How the saved model holds its weights, float32 or int8; None for float32. What is measured is float32."""

    def __post_init__(self) -> None:
        for file in (self.text, self.validate):
            if file is not None and not file.is_file():
                raise ValueError(f"{file} does not exist; give a text file in UTF-8")
        check_kind(self.weights)
        if self.adaptation is not None and self.text is None:
            raise ValueError(f"--adapt {self.adaptation.steps} needs a text to train on; give one with --text")

    @property
    def measured(self) -> Path | None:
        """The text to measure on."""
        return self.text if self.validate is None else self.validate


def convert(
    source: str,
    out: Path,
    wanted: Conversion,
    *,
    result: Path | None = None,
    say: Say = lambda sentence: None,
    on_step: OnStep = lambda step, loss: None,
) -> RetrofitRun:
    """Save a pretrained model with another mechanism as the new folder `out`, and add what was measured to `result`.

    Args:
        source: as in load_pretrained.
        out: must not exist.
        wanted: the mechanism, the texts and the adaptation.
        result: a file of such runs; a run of the same mechanism and options in it is replaced.
        say: called with a sentence after each part of the work.
        on_step: called with each step of the adaptation and its loss.
    """
    refuse_existing(out)
    require_folder(result)
    read_results(result)
    if result is not None and wanted.measured is None:
        raise ValueError("--json needs something to measure on; give a text with --text or --validate")
    made = retrofit(
        source,
        mechanism=wanted.mechanism,
        options=wanted.options,
        context=wanted.context,
        dtype=torch.float32,
        seed=wanted.seed,
    )
    say(f"{made.source.config.model_type} {source}: {wanted.mechanism} {json.dumps(made.options)}")
    say(made.promise())
    run = RetrofitRun(
        mechanism=wanted.mechanism,
        asked=wanted.options,
        options=made.options,
        context=made.context,
        share=made.share,
        seed=wanted.seed,
    )
    if wanted.measured is not None:
        if made.tokenizer is None:
            raise ValueError(f"{source} has no tokenizer, so a text cannot be measured; leave --text out")
        run = measured_run(made, run, wanted, wanted.measured, say=say, on_step=on_step)
    save_model(with_weights(made.model, wanted.weights), out, tokenizer=made.tokenizer)
    say(f"saved {out}")
    run = replace(run, environment=environment())
    if result is not None:
        # The file is read again because others may have written to it meanwhile.
        read_results(result).with_run(run).write(result)
    return run


def measured_run(
    made: Retrofitted, run: RetrofitRun, wanted: Conversion, file: Path, *, say: Say, on_step: OnStep
) -> RetrofitRun:
    """The run with its losses on a text before and after the adaptation."""
    known = read_rows(file, made.tokenizer, length=made.context, most=wanted.rows)
    distance = measure_distance(made.source, made.model, known)
    say(
        f"{known.numel()} tokens of {file}: loss of the source {distance.first_loss:.4f}, of the new model "
        f"{distance.second_loss:.4f}, largest logit difference {distance.largest_logit_difference:.1e}"
    )
    run = replace(
        run,
        text=file.name,
        tokens=known.numel(),
        source_loss=distance.first_loss,
        loss_before=distance.second_loss,
        largest_logit_difference=distance.largest_logit_difference,
    )
    plan = wanted.adaptation
    if plan is None or wanted.text is None:
        return run
    rows = read_rows(wanted.text, made.tokenizer, length=made.context, most=plan.steps * plan.batch)
    losses = adapt(made.model, rows, plan, on_step=on_step)
    after = mean_loss(made.model, known)
    say(f"after {plan.steps} steps of {plan.batch} x {made.context} tokens: loss {after:.4f}")
    return replace(
        run,
        adaptation=AdaptationRecord(
            steps=plan.steps, batch=plan.batch, rate=plan.rate, mechanism_rate=plan.mechanism_rate
        ),
        training_text=wanted.text.name,
        training_losses=tuple(losses),
        loss_after=after,
    )


def read_results(file: Path | None) -> RetrofitResult:
    """The runs of a result file; none if it does not exist yet."""
    return RetrofitResult(runs=()) if file is None or not file.exists() else RetrofitResult.read(file)
