"""The whole way of `varifocal focus`: open, fit, decide, cut the cache, win back, save."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from varifocal.environment import environment
from varifocal.results.focus import FocusedHead, FocusMap
from varifocal.retrofit.adaptation import Adaptation
from varifocal.retrofit.families import FAMILIES, sliding_layers, take_over
from varifocal.retrofit.focus.calibrate import calibrate
from varifocal.retrofit.focus.decide import (
    CacheSizes,
    Map,
    fewest_heads,
    heads_of_share,
    keep_highest,
    share_of,
    windows_of,
)
from varifocal.retrofit.focus.duo import fit_duo
from varifocal.retrofit.focus.fit import FitPlan, FitStep, Fitted, fit_gates
from varifocal.retrofit.focus.gates import GatedModel
from varifocal.retrofit.focus.measure import loss_by_position
from varifocal.retrofit.focus.recover import recover, text_losses
from varifocal.retrofit.focus.texts import Library, fit_rows, question_rows
from varifocal.retrofit.retrofit import refuse_existing, save_model
from varifocal.retrofit.sources import open_source, read_tokenizer
from varifocal.statistics.estimates import paired_difference

Say = Callable[[str], None]
CALIBRATION_ROWS = 8
HELD_OUT = 8
"""Documents that are measured for an accepted loss, and not fitted on."""


@dataclass(frozen=True, kw_only=True)
class Focusing:
    """What is asked for: how to fit, and by what to decide how many heads read everything."""

    fit: FitPlan
    budget: int | None = None
    """Bytes of the cache at `budget_length` tokens, instead of a share."""
    budget_length: int = 8192
    accept: float | None = None
    """The largest rise of the loss, in nats a token, instead of a share."""
    adaptation: Adaptation | None = None
    lora: int | None = None
    """The rank of the adaptation; None for all weights."""
    scores: Path | None = None
    """A focused model whose scores are taken in place of a fit."""

    def __post_init__(self) -> None:
        if self.budget is not None and self.accept is not None:
            raise ValueError("a budget of bytes and an accepted loss cannot both decide; give one of them")
        if self.lora is not None and self.adaptation is None:
            raise ValueError("a rank of adapters is for an adaptation; give its steps with --adapt too")
        if self.accept is not None and not self.accept > 0:
            raise ValueError(f"the accepted rise of the loss must be above 0, got {self.accept:g}")


@dataclass(frozen=True, eq=False)
class Opened:
    """A dense model with the gates of a fit, and where it came from."""

    source: PreTrainedModel
    gated: GatedModel
    tokenizer: Any

    @property
    def sizes(self) -> CacheSizes:
        """What decides the bytes of its cache."""
        first = self.gated.gates[0]
        return CacheSizes(
            layers=self.gated.layers, kv_heads=self.gated.kv_heads, head_width=first.shape.head_width,
            bytes_per_number=self.gated.model.dtype.itemsize, window=first.config.window, sinks=first.config.sinks,
        )  # fmt: skip


def open_dense(source: str | Path, plan: FitPlan) -> Opened:
    """A pretrained model to be focused; ValueError if it has windows already, or no tokenizer."""
    model = open_source(source, FAMILIES, dtype=torch.float32)
    if any(window is not None for window in sliding_layers(model.config)):
        raise ValueError(
            f"{source} has sliding windows in some layers already; focus takes models that read everything"
        )
    if getattr(model.config, "mechanism", "dense") != "dense":
        raise ValueError(f"{source} has the mechanism {model.config.mechanism!r}; focus takes dense models")
    tokenizer = read_tokenizer(source)
    if tokenizer is None:
        raise ValueError(f"{source} has no tokenizer; put its tokenizer.json beside the weights")
    longest = model.config.max_position_embeddings
    if max(plan.lengths) > longest:
        raise ValueError(f"the model reads {longest} tokens; give a --length of at most that, got {max(plan.lengths)}")
    gated = GatedModel(take_over(model), window=plan.window, sinks=plan.sinks)
    return Opened(model, gated, tokenizer)


def fit(
    opened: Opened,
    library: Library,
    plan: FitPlan,
    *,
    state: Path | None = None,
    of: str = "",
    on_step: Callable[[FitStep], None] = lambda step: None,
) -> Fitted:
    """Scores of all key heads by the way that the plan names."""
    if plan.way == "duo":
        asked = question_rows(library, plan.lengths, seed=plan.seed, facts=plan.facts)
        return fit_duo(opened.gated, asked, plan, on_step=on_step)
    rows = fit_rows(library, plan.lengths, seed=plan.seed, facts=plan.facts)
    if plan.way != "calibrate":
        return fit_gates(opened.gated, rows, plan, state=state, of=of, on_step=on_step)

    def said(row: int) -> None:
        on_step(FitStep(row, 0.0, 1.0, torch.empty(0)))

    return Fitted(calibrate(opened.gated, rows, CALIBRATION_ROWS, on_row=said))


def decide(opened: Opened, scores: Tensor, wanted: Focusing, held_out: Tensor | None) -> tuple[Map, str]:
    """The map, and by what it was decided in a few words."""
    heads = scores.numel()
    if wanted.budget is not None:
        count = opened.sizes.heads_within(wanted.budget, wanted.budget_length)
        return keep_highest(scores, count), f"a cache of {wanted.budget:,} bytes at {wanted.budget_length} tokens"
    if wanted.accept is None:
        return keep_highest(scores, heads_of_share(wanted.fit.keep, heads)), f"a share of {wanted.fit.keep:.3g}"
    assert held_out is not None
    gated = opened.gated
    with gated.reading("everything"):
        dense = float(loss_by_position(gated, held_out).mean())

    def rise(count: int) -> float:
        with gated.by_map(keep_highest(scores, count)):
            return float(loss_by_position(gated, held_out).mean()) - dense

    count = fewest_heads(rise, wanted.accept, heads)
    return keep_highest(scores, count), f"a rise of the loss of at most {wanted.accept:g} nats a token"


def focus(
    source: str | Path,
    out: Path,
    texts: Iterable[str],
    wanted: Focusing,
    *,
    named: str = "texts",
    say: Say = lambda sentence: None,
    on_step: Callable[[FitStep], None] = lambda step: None,
    on_adapt: Callable[[int, float], None] = lambda step, loss: None,
) -> FocusMap:
    """Save a pretrained model whose windowed heads keep a window of their cache as the new folder `out`.

    Args:
        source: as in load_pretrained.
        out: must not exist; while the fit runs, its state is beside it, and the same command goes on from there.
        texts: long documents to fit on.
        wanted: how to fit, and how to decide.
        named: what the documents are called in the map.
        say: called with a sentence after each part of the work.
        on_step: called after each step of the fit.
        on_adapt: called with each step of the adaptation and its loss.
    """
    refuse_existing(out)
    plan = wanted.fit
    earlier = None if wanted.scores is None else FocusMap.read(wanted.scores / FocusMap.filename)
    opened = open_dense(source, plan)
    hold_out = wanted.accept is not None or wanted.adaptation is not None
    library, held_out = libraries(texts, opened.tokenizer, plan, hold_out=hold_out)
    say(
        f"{opened.source.config.model_type} {source}: {opened.gated.layers} layers of {opened.gated.kv_heads} key "
        f"heads; "
        + (
            f"{plan.way} on {len(library.documents)} documents of {named}"
            if earlier is None
            else f"scores of {wanted.scores}"
        )
    )
    state = out.with_name(f".{out.name}.fit.json")
    begun = time.perf_counter()
    if earlier is not None:
        fitted = scores_of(earlier, opened)
    else:
        fitted = fit(opened, library, plan, state=state, of=f"{source}, {named}", on_step=on_step)
    seconds = time.perf_counter() - begun
    full, decided_by = decide(opened, fitted.scores, wanted, held_out)
    record = FocusMap(
        source=Path(source).name, fit=asdict(plan) if earlier is None else {**earlier.fit, "keep": plan.keep},
        texts=named if earlier is None else earlier.texts, decided_by=decided_by, sinks=plan.sinks,
        heads=tuple(
            FocusedHead(
                layer=layer, head=head, score=round(float(fitted.scores[layer, head]), 6),
                window=None if reads else plan.window,
            )
            for layer, heads in enumerate(full) for head, reads in enumerate(heads)
        ),
        losses=fitted.losses, traces=fitted.traces, seconds=round(seconds, 1), environment=environment(),
    )  # fmt: skip
    count = sum(map(sum, full))
    sizes = opened.sizes
    at = min(8192, opened.source.config.max_position_embeddings)
    dense = tuple((True,) * sizes.kv_heads for _ in range(sizes.layers))
    say(
        f"{count} of {fitted.scores.numel()} key heads read everything ({share_of(full):.0%}), by {decided_by}; "
        f"cache at {at} tokens {sizes.of_map(full, at) / sizes.of_map(dense, at):.2f} of dense"
    )
    model = focused_model(opened.source, full, plan)
    if wanted.adaptation is not None:
        draw = random.Random(plan.seed + 1)
        adaptation = wanted.adaptation
        rows = (
            torch.tensor([library.passage(max(plan.lengths), draw) for _ in range(adaptation.batch)])
            for _ in range(adaptation.steps)
        )
        assert held_out is not None
        with opened.gated.reading("everything"):
            dense_loss = text_losses(opened.gated.model, held_out)
        before = text_losses(model, held_out)
        losses = recover(model, opened.gated, rows, adaptation, lora=wanted.lora, on_step=on_adapt)
        rises = [paired_difference(one, dense_loss) for one in (before, text_losses(model, held_out))]
        record = replace(
            record,
            adaptation={
                **asdict(adaptation), "lora": wanted.lora, "losses": losses, "documents": len(held_out),
                "rise_before": rises[0].to_json(), "rise_after": rises[1].to_json(),
            },
        )  # fmt: skip
        say(
            f"adapted for {adaptation.steps} steps: distance to dense {losses[0]:.4f} -> {losses[-1]:.4f}; loss on "
            f"{len(held_out)} documents that were not trained on, against dense: "
            + " -> ".join(f"{one.mean:+.4f} ± {one.half_width or 0:.4f}" for one in rises)
        )
    save_model(model, out, tokenizer=opened.tokenizer, also=lambda folder: record.write(folder / FocusMap.filename))
    state.unlink(missing_ok=True)
    say(f"saved {out}")
    return record


def scores_of(record: FocusMap, opened: Opened) -> Fitted:
    """The scores of an earlier fit; ValueError if it was of a model with other heads."""
    layers, heads = opened.gated.layers, opened.gated.kv_heads
    if len(record.heads) != layers * heads:
        raise ValueError(f"the scores are of {len(record.heads)} key heads, and the model has {layers * heads}")
    scores = torch.tensor([one.score for one in record.heads]).view(layers, heads)
    return Fitted(scores, record.traces, record.losses)


def libraries(texts: Iterable[str], tokenizer: Any, plan: FitPlan, *, hold_out: bool) -> tuple[Library, Tensor | None]:
    """What is fitted on and, if asked for, rows of other documents to measure on."""
    library = Library(texts, tokenizer, least=max(plan.lengths))
    if not hold_out:
        return library, None
    if len(library.documents) <= HELD_OUT:
        raise ValueError(
            f"{HELD_OUT} documents are held out to measure the loss on, and the texts have {len(library.documents)} of "
            f"{max(plan.lengths)} tokens or more; give more texts, or leave --accept and --adapt out"
        )
    kept, library.documents = library.documents[:HELD_OUT], library.documents[HELD_OUT:]
    return library, torch.tensor([document[: max(plan.lengths)] for document in kept])


def focused_model(source: PreTrainedModel, full: Sequence[Sequence[bool]], plan: FitPlan) -> Any:
    """A copy of the source with the mechanism `focused`, whose heads read as a map says."""
    windows = windows_of(tuple(map(tuple, full)), plan.window)
    return take_over(
        source,
        mechanism=["focused"] * len(windows),
        mechanism_options=[{"windows": layer, "sinks": plan.sinks} for layer in windows],
    )
