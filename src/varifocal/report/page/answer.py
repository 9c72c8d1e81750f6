"""The question that a page asks, and as much of an answer as the intervals support."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from varifocal.report.comparison_tables import SURE, seeds_words
from varifocal.report.focus import compared_losses, facts_of, rise
from varifocal.report.page.focus_figures import cache_shares
from varifocal.report.page.sources import FocusFiles, RunFiles, Source
from varifocal.report.table import p_text
from varifocal.results.comparison import ArmResult
from varifocal.results.focus import FocusMap, FocusMeasure, MapLosses
from varifocal.statistics.comparison import Comparison


@dataclass(frozen=True)
class Answer:
    """A question, its answer in a few words, and the reasons."""

    question: str
    short: str
    reasons: tuple[str, ...]


def answer_of(source: Source) -> Answer:
    """The answer of a focused model, of a comparison or of a run."""
    if source.focus is not None:
        return answer_of_focus(source.focus)
    if source.comparison is not None:
        return answer_of_comparison(source.comparison)
    (run,) = source.every_run()
    return answer_of_run(run)


def answer_of_comparison(comparison: Comparison) -> Answer:
    """Whether another attention lowers the validation loss of the baseline."""
    baseline = comparison.baseline
    question = (
        "The same model, data and budget, only the attention changed: is the validation loss lower than with "
        f"{baseline}?"
    )
    compared = [result for result in comparison.results if result.difference is not None]
    if not compared:
        return Answer(question, "Not known yet.", (f"No other arm shares a finished seed with {baseline}.",))
    measured = [result for result in compared if result.difference and result.difference.half_width is not None]
    if not measured:
        spread = ", ".join(f"{result.name} {result.difference.mean:+.4f}" for result in compared if result.difference)
        return Answer(
            question,
            "One seed: nothing can be concluded.",
            (f"Differences from {baseline} in nats a token, below 0 is lower: {spread}. "
             "Without a second seed their spread is not known.",),
        )  # fmt: skip
    lower = [result for result in measured if is_sure(result) and result.difference and result.difference.mean < 0]
    higher = [result for result in measured if is_sure(result) and result.difference and result.difference.mean > 0]
    rest = [result.name for result in compared if result not in lower and result not in higher]
    if lower:
        short = f"Lower with {listed([result.name for result in lower])}."
    elif higher and not rest:
        short = f"No: higher with {listed([result.name for result in higher])}."
    elif higher:
        short = f"Not lower; higher with {listed([one.name for one in higher])}."
    else:
        short = f"No difference shown for {listed(rest)}."
    reasons = [sentence(result, "lower", baseline) for result in lower]
    reasons += [sentence(result, "higher", baseline) for result in higher]
    if rest and (lower or higher):
        reasons.append(f"No difference shown for {listed(rest)}.")
    nearest = [one for one in measured if one.name in rest and one.difference is not None]
    if nearest and not lower:
        best = min(nearest, key=lambda one: one.difference.mean if one.difference else 0.0)
        assert best.difference is not None
        reasons.append(f"The lowest of them is {best.name}: {seeds_words(best.difference)}.")
    return Answer(question, short, tuple(reasons))


def answer_of_focus(files: FocusFiles) -> Answer:
    """What a focused model saves, and what that costs."""
    record, measured = files.map, files.measured
    count = sum(head.window is None for head in record.heads)
    name = Path(record.source).stem
    question = (
        f"{name}, with a window for every key head that can do without the far text: what is saved, what is lost?"
    )
    reads = f"{count} of {len(record.heads)} key heads read everything"
    found = None if measured is None else losses_of_map(record, measured)
    if measured is None or found is None:
        return Answer(question, f"{reads}; the loss was not measured.", ())
    row, dense = found
    more = rise(row, dense)
    low, high = more.interval or (more.mean, more.mean)
    share = cache_shares(measured).get((row.name, row.keep))
    saved = "" if share is None else f"{1 - share:.0%} of the cache saved, "
    before = sum(map(sum, dense.documents)) / sum(map(len, dense.documents))
    reasons = [
        f"{reads}. The loss rises from {before:.3f} by {more.mean:.4f} nats a token (95 % interval {low:+.4f} to "
        f"{high:+.4f} over {more.count} texts of {row.length} tokens)."
    ]
    if (facts := facts_of(measured, row.name, row.keep)) is not None:
        chance = facts_of(measured, "random", row.keep)
        others = "" if chance is None else f"; as many heads by chance find {chance.mean:.0%}"
        reasons.append(
            f"Of {facts.count} facts that the dense model finds in a text, it finds {facts.mean:.0%}{others}."
        )
    if files.question is not None:
        said = " and ".join(f"{one.name} says {one.said}" for one in files.question.answers)
        reasons.append(
            f"Asked for a number that stands {files.question.back:,} tokens back ({files.question.answer}), {said}."
        )
    return Answer(question, f"{saved}{more.mean:+.3f} nats a token.", tuple(reasons))


def losses_of_map(record: FocusMap, measured: FocusMeasure) -> tuple[MapLosses, MapLosses] | None:
    """What the map itself loses, or the share nearest to it, with dense on the same texts; None if not measured."""
    way = str(record.fit.get("way"))
    rows = [one for one in compared_losses(measured) if one[0].name.startswith(way)]
    return min(rows, key=lambda one: abs(one[0].keep - record.share), default=None)


def is_sure(result: ArmResult) -> bool:
    """Whether the interval and the corrected p-value both support the claim."""
    return bool(
        result.difference
        and result.difference.excludes_zero
        and result.adjusted_p is not None
        and result.adjusted_p < SURE
    )


def sentence(result: ArmResult, word: str, baseline: str) -> str:
    """The claim with its interval."""
    found = result.difference
    assert found is not None
    low, high = found.interval or (float("nan"), float("nan"))
    return (
        f"{result.name} is {word} than {baseline} by {abs(found.mean):.4f} nats a token (95 % interval {low:+.4f} to "
        f"{high:+.4f} over {found.count} seeds, p {equals(p_text(result.adjusted_p))} after Holm's correction)."
    )


def equals(text: str) -> str:
    """= 0.012, or < 0.001."""
    return text.replace("<", "< ") if text.startswith("<") else f"= {text}"


def answer_of_run(run: RunFiles) -> Answer:
    """What loss a single run reached."""
    question = f"What loss did {run.name} reach?"
    if run.summary is None:
        reached = f"; the last validation loss is {run.curve[-1][1]:.4f} nats a token" if run.curve else ""
        return Answer(question, f"Not finished: step {run.step}{reached}.", ())
    done = run.summary
    return Answer(
        question,
        f"Validation loss {done.validation_loss:.4f} nats a token after {done.steps} steps.",
        (f"{done.tokens:,} tokens of training. One run has no spread: 'varifocal compare' sets it beside others.",),
    )


def listed(names: list[str]) -> str:
    """a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
