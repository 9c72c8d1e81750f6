"""The question that a page asks, and as much of an answer as the intervals support."""

from __future__ import annotations

from dataclasses import dataclass

from varifocal.report.page.sources import RunFiles
from varifocal.report.table import p_text
from varifocal.results.comparison import ArmResult
from varifocal.statistics.comparison import Comparison

SURE = 0.05
"""A claim needs a p-value below this after Holm's correction, and an interval that excludes 0."""


@dataclass(frozen=True)
class Answer:
    """A question, its answer in a few words, and the reasons."""

    question: str
    short: str
    reasons: tuple[str, ...]


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
    else:
        short = (
            "No difference shown." if not higher else f"Not lower; higher with {listed([one.name for one in higher])}."
        )
    reasons = [sentence(result, "lower", baseline) for result in lower]
    reasons += [sentence(result, "higher", baseline) for result in higher]
    if rest:
        reasons.append(f"No difference shown for {listed(rest)}.")
    return Answer(question, short, tuple(reasons))


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
