"""A first look: a pretrained model focused, measured beside itself on other texts than it was fitted on, and asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from varifocal.model.checkpoints import load_model
from varifocal.results.focus import FocusMap, FocusMeasure, FocusQuestion, MapLosses
from varifocal.retrofit.families import load_pretrained
from varifocal.retrofit.focus.comparison import (
    DENSE,
    Journal,
    Kinds,
    Measuring,
    Texts,
    contestants,
    fresh_result,
    measure_texts,
    name_of,
    no_kinds,
    open_measured,
)
from varifocal.retrofit.focus.far_question import ask_far_back
from varifocal.retrofit.focus.fit import FitPlan, FitStep
from varifocal.retrofit.focus.focusing import Focusing, focus
from varifocal.retrofit.focus.footprint import measure_caches
from varifocal.retrofit.focus.texts import Library
from varifocal.retrofit.opening import tokenizer_of
from varifocal.statistics.estimates import paired_difference

HELD_OUT = 6
"""Every so many-th document is measured on and not fitted on."""
OnPart = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


@dataclass(frozen=True, kw_only=True)
class DemoPlan:
    """How much is fitted and measured."""

    keep: float = 1 / 3
    fit: FitPlan = field(default_factory=lambda: FitPlan(steps=14, rate=0.4, lengths=(768, 1024)))
    measuring: Measuring = field(
        default_factory=lambda: Measuring(
            length=1536, documents=8, questions=8, fact_lengths=(1024,), shares=(1 / 3,), rival_shares=(1 / 3,)
        )
    )
    question_length: int = 1600
    cache_length: int = 8192


@dataclass(frozen=True)
class DemoResult:
    """What was found."""

    map: FocusMap
    measured: FocusMeasure
    question: FocusQuestion


def run_demo(
    source: str,
    out: Path,
    texts: Iterable[str],
    plan: DemoPlan,
    *,
    named: str = "texts",
    kinds: Kinds = no_kinds,
    say: Callable[[str], None] = lambda sentence: None,
    on_part: OnPart = lambda part, done, total: None,
) -> DemoResult:
    """Focus a pretrained model into the folder `out`, measure it and ask it a question; finished parts are read again.

    Args:
        source: as in load_pretrained.
        out: the folder of the focused model, which also gets measured.json and question.json.
        texts: long documents; every sixth is kept for measuring.
        plan: how much of each.
        named: what the documents are called.
        kinds: as in measure_maps.
        say: called with a sentence after each part.
        on_part: called as the work goes on.
    """
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    fitted, held_out = divided(texts)
    if (out / FocusMap.filename).is_file():
        record = FocusMap.read(out / FocusMap.filename)
        say(f"{out} is focused already")
    else:

        def step(one: FitStep) -> None:
            on_part("fitting gates", one.step, plan.fit.steps)

        record = focus(source, out, fitted, Focusing(fit=plan.fit), named=named, say=say, on_step=step)
    opened, _ = open_measured(out, source)
    found = contestants(opened, [(out, record)], plan.measuring, source=source)
    # Whole layers would take a fifth more time; `varifocal measure` has them.
    maps = [one for one in found if one.name != "layers in turn"]
    journal = Journal.open(out / FocusMeasure.filename, fresh_result(opened, record.source, plan.measuring.seed))
    if not journal.result.caches:
        journal.change(caches=measure_caches(maps, (plan.cache_length,)))
    # What the journal holds is not measured again.
    others = Texts(f"{named}, not fitted on", lambda: held_out)
    measure_texts(opened, maps, [others], plan.measuring, journal, kinds=kinds, on_count=on_part)
    on_part("asking", 0, 1)
    library = Library(held_out, tokenizer_of(source), least=plan.question_length, most=4)
    models = {"dense": load_pretrained(source), "focused": load_model(out)}
    question = ask_far_back(models, library, length=plan.question_length)
    question.write(out / FocusQuestion.filename)
    return DemoResult(record, journal.result, question)


def divided(texts: Iterable[str]) -> tuple[list[str], list[str]]:
    """Documents to fit on, and documents to measure on."""
    documents = list(texts)
    held_out = documents[HELD_OUT - 1 :: HELD_OUT]
    return [one for number, one in enumerate(documents) if number % HELD_OUT != HELD_OUT - 1], held_out


def fitted_losses(measured: FocusMeasure, record: FocusMap) -> MapLosses:
    """What the fitted map itself was measured to lose."""
    rows = [row for row in measured.losses if row.name == name_of(record)]
    return min(rows, key=lambda row: abs(row.keep - record.share))


def losses_of(measured: FocusMeasure, name: str) -> list[float]:
    """The mean loss of each document under a map."""
    row = next(row for row in measured.losses if row.name == name)
    return means(row)


def means(row: MapLosses) -> list[float]:
    """The mean loss of each document."""
    return [sum(document) / len(document) for document in row.documents]


def cache_share(measured: FocusMeasure, row: MapLosses) -> float:
    """The bytes of a map's longest cache against dense."""
    caches = {(one.name, one.keep): one.bytes for one in measured.caches}
    mine, dense = caches[(row.name, row.keep)], caches[(DENSE, 1.0)]
    length = str(max(map(int, mine)))
    return mine[length] / dense[length]


def conclusion(result: DemoResult) -> str:
    """What the demo found, in a sentence with its intervals."""
    measured = result.measured
    row = fitted_losses(measured, result.map)
    rise = paired_difference(means(row), losses_of(measured, DENSE))
    low, high = rise.interval or (rise.mean, rise.mean)
    heads = len(result.map.heads)
    count = sum(head.window is None for head in result.map.heads)
    length = max(int(one) for cache in measured.caches for one in cache.bytes)
    sentence = (
        f"{Path(measured.source).stem} with {count} of {heads} key heads reading everything keeps "
        f"{cache_share(measured, row):.0%} of its cache at {length:,} tokens, and its loss rises by {rise.mean:.3f} "
        f"nats a token (95 % interval {low:.3f} to {high:.3f}, {rise.count} texts that were not fitted on)"
    )
    chance = [one for one in measured.losses if one.name == "random" and one.keep == row.keep]
    if not chance:
        return f"{sentence}."
    more = paired_difference(means(chance[0]), means(row))
    least, most = more.interval or (more.mean, more.mean)
    told = f"{count} heads by chance lose {more.mean:.3f} more ({least:.3f} to {most:.3f})"
    if more.excludes_zero:
        return f"{sentence}; {told}."
    return f"{sentence}; {told}: that interval holds 0, so on these texts the fit is not shown to beat chance."
