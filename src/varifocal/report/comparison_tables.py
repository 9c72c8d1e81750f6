"""A comparison as tables: losses, costs, recall, and the papers' own numbers beside ours."""

from __future__ import annotations

from collections.abc import Iterable

from varifocal.report.table import Table, markdown, p_text, ratio, without_empty_columns
from varifocal.results.comparison import ArmResult, Setting
from varifocal.results.estimates import Difference, Estimate
from varifocal.results.papers import PaperTable, paper_tables
from varifocal.statistics.comparison import Comparison
from varifocal.statistics.estimates import estimate, seeds_needed

SURE = 0.05
"""A claim needs a p-value below this after Holm's correction, and an interval that excludes 0."""
LEARNING_LEGEND = "Right answers at each validation, on the validation split: the mean over seeds ± half the interval."
RECALL_LEGEND = "The table shows the share of right answers on the test split."


def loss_table(comparison: Comparison) -> Table:
    """Header and rows: losses, and the paired difference from the baseline with its p-value."""
    results = comparison.results
    ablates = any(result.reference is not None for result in results)
    tested = any(result.test_loss is not None for result in results)
    averaged = any(result.unaveraged_loss is not None for result in results)
    header = [
        "",
        "seeds",
        "validation loss",
        "spread",
        *(["unaveraged"] if averaged else []),
        f"vs {comparison.baseline}",
        "p",
        "p (Holm)",
    ]
    header += ["vs its full form", "p"] if ablates else []
    header += ["bits per byte", *(["test loss"] if tested else [])]
    body = []
    for result in results:
        row = [
            result.name,
            str(len(result.seeds)),
            with_interval(result.validation_loss),
            spread(result.validation_loss),
            *([spread(result.unaveraged_loss)] if averaged else []),
            signed(result.difference),
            p_text(None if result.difference is None else result.difference.p_value),
            p_text(result.adjusted_p),
        ]
        if ablates:
            full = result.to_reference
            row += [signed(full), p_text(None if full is None else full.p_value)]
        row += [f"{result.bits_per_byte.mean:.4f}", *([with_interval(result.test_loss)] if tested else [])]
        body.append(row)
    return without_empty_columns([header, *body])


def spread(losses: Estimate | None) -> str:
    """The standard deviation between seeds."""
    return "" if losses is None or losses.deviation is None else f"{losses.deviation:.4f}"


def cost_table(comparison: Comparison) -> Table:
    """Header and rows: parameters, memory, throughput and time, with their ratios to the baseline."""
    body = []
    for result in comparison.results:
        body.append([
            result.name,
            f"{result.parameters:,}",
            "" if result.peak_bytes is None else f"{result.peak_bytes.mean / 1e6:,.0f} MB",
            ratio(result.memory_ratio),
            f"{result.tokens_per_second.mean:,.0f}",
            ratio(result.speed_ratio),
            duration(result.seconds.mean),
        ])  # fmt: skip
    return [["", "parameters", "peak memory", "ratio", "tokens/s", "ratio", "training time"], *body]


def time_table(comparison: Comparison) -> Table | None:
    """Header and rows: the loss of each arm when the baseline ended; None if no other arm has recorded times."""
    results = comparison.results
    if all(result.difference_at_time is None for result in results):
        return None
    speeds = [
        comparison.ratio(result.name, lambda cell: cell.processor_seconds and cell.tokens / cell.processor_seconds)
        for result in results
    ]
    header = ["", "seeds", f"loss at {comparison.baseline}'s end", f"vs {comparison.baseline}", "p", "p (Holm)"]
    header += ["processor time", "tokens", "tokens a processor second"]
    body = [
        [
            result.name,
            str(len(result.seeds)),
            with_interval(result.loss_at_time),
            signed(result.difference_at_time),
            p_text(None if result.difference_at_time is None else result.difference_at_time.p_value),
            p_text(result.adjusted_p_at_time),
            "" if result.processor_seconds is None else duration(result.processor_seconds.mean),
            "" if result.tokens is None else millions(round(result.tokens.mean)),
            ratio(speed),
        ]
        for result, speed in zip(results, speeds, strict=True)
    ]
    return without_empty_columns([header, *body])


def recall_table(comparison: Comparison) -> Table | None:
    """Header and rows: the share of right answers by distance; None if the data are not a probe."""
    results = [result for result in comparison.results if result.recall]
    if not results:
        return None
    distances = sorted({distance for result in results for distance in result.recall}, key=int)
    body = [
        [result.name, *(share(result.recall.get(distance)) for distance in distances)] for result in results
    ]  # fmt: skip
    return [["right answers at distance", *distances], *body]


def learning_table(comparison: Comparison) -> Table | None:
    """Header and rows: the share of right answers at each validation; None if the data are not a probe."""
    curves = {
        result.name: [dict(cell.accuracy_curve or ()) for cell in comparison.cells(result.name).values()]
        for result in comparison.results
    }
    steps = sorted({step for cells in curves.values() for one in cells for step in one})
    if not steps:
        return None
    body = [
        [
            name,
            *(
                share(estimate(found) if (found := [one[step] for one in cells if step in one]) else None)
                for step in steps
            ),
        ]
        for name, cells in curves.items()
    ]
    return [["right answers after steps", *map(str, steps)], *body]


def paper_comparisons(comparison: Comparison) -> list[tuple[PaperTable, Table]]:
    """The papers' tables of which we ran the baseline and at least one other row, with our numbers beside theirs."""
    known = {result.name: result for result in comparison.results}
    shown = []
    for table in paper_tables():
        names = [row.mechanism for row in table.rows]
        # A table of ablations is shown only if one of the ablations was run.
        asked = [name for name in names if "." in name] or names[1:]
        if names[0] in known and any(name in known for name in asked):
            shown.append((table, beside(table, known)))
    return shown


def beside(table: PaperTable, known: dict[str, ArmResult]) -> Table:
    """A paper's rows beside ours: its columns as printed, then our loss, memory, speed or time."""
    base = table.rows[0].number(table.loss)
    assert base is not None
    header = [
        "",
        *(f"paper: {column}" for column in table.columns),
        "paper: vs baseline",
        "ours: loss",
        "ours: vs dense",
    ]
    header += ["ours: memory"] if table.memory else []
    header += ["ours: speed"] if table.speed else []
    header += ["ours: time"] if table.time else []
    body = []
    for row in table.rows:
        loss, result = row.number(table.loss), known.get(row.mechanism)
        assert loss is not None
        cells = [f"{row.method} ({row.mechanism})", *row.values.values(), f"{loss - base:+.3f}"]
        if result is None:
            cells += ["not run"] + [""] * (len(header) - len(cells) - 1)
        else:
            cells += [with_interval(result.validation_loss), signed(result.difference)]
            cells += [ratio(result.memory_ratio)] if table.memory else []
            cells += [ratio(result.speed_ratio)] if table.speed else []
            cells += [duration(result.seconds.mean)] if table.time else []
        body.append(cells)
    return without_empty_columns([header, *body])


def our_setting(comparison: Comparison) -> str:
    """One line: what all of our cells share."""
    setting, seeds = comparison.setting, len(comparison.record.seeds)
    few, many = map(millions, setting.parameters)
    parts = [
        f"{few} parameters" if few == many else f"{few} to {many} parameters",
        f"{setting.data}, {budget(setting)} of training",
        f"batches of {setting.batch} texts of {setting.length} tokens",
        setting.precision,
        f"{seeds} seed{'' if seeds == 1 else 's'}",
    ]
    return ", ".join(part for part in parts if part)


def budget(setting: Setting) -> str:
    """How long each cell trains."""
    tokens = f"{millions(setting.tokens)} tokens"
    return tokens if setting.seconds is None else f"{setting.seconds:g} processor seconds (up to {tokens})"


def scaled_down(comparison: Comparison, table: PaperTable | None = None) -> str:
    """One line: what was scaled down, compared with one paper or with all of them."""
    if table is None:
        papers = "132M to 134M parameters on FineWeb, 10B tokens or 50,000 steps, one run each"
    else:
        names = {"batch": "batches of {}", "rate": "learning rate {}", "window": "window {}", "data": "{}"}
        setting = {name: names.get(name, "{} parameters").format(value) for name, value in table.setting.items()}
        papers = ", ".join(setting.values())
    have = "papers have" if table is None else "paper has"
    return f"Scaled down: our runs have {our_setting(comparison)}; the {have} {papers}."


def verdicts(comparison: Comparison) -> list[str]:
    """A sentence for each arm that claims no more than its interval supports."""
    return [
        verdict(result.name, comparison.baseline, result.difference, result.adjusted_p)
        for result in comparison.results
        if result.name != comparison.baseline
    ] + [
        verdict(result.name, result.reference, result.to_reference)
        for result in comparison.results
        if result.reference not in (None, comparison.baseline)
    ]


def verdict(name: str, other: str | None, difference: Difference | None, adjusted_p: float | None = None) -> str:
    """What can be said about the difference between two arms; `adjusted_p` if they are two of several."""
    if difference is None:
        return f"{name} and {other} share no seed, so they cannot be compared."
    if difference.interval is None:
        return f"{name} differs from {other} by {difference.mean:+.4f} with one seed, so the spread is not known."
    low, high = difference.interval
    if low == high == 0:
        return f"{name} has exactly the loss of {other} with every seed."
    where = f"95 % interval {low:+.4f} to {high:+.4f} over {difference.count} seeds"
    if not difference.excludes_zero:
        return f"{name} shows no difference from {other} ({where}); {seeds_words(difference)}."
    if adjusted_p is not None and adjusted_p >= SURE:
        return (
            f"{name} is not shown to differ from {other}: its interval leaves out 0 ({where}), but p is "
            f"{p_text(adjusted_p)} after Holm's correction for all arms."
        )
    lower = "lower" if difference.mean < 0 else "higher"
    return f"{name} has a {lower} loss than {other} by {abs(difference.mean):.4f} ({where})."


def seeds_words(difference: Difference) -> str:
    """How many seeds it would take to show the difference that was seen."""
    if difference.deviation is None:
        return "a second seed would tell its spread"
    count = seeds_needed(difference.mean, difference.deviation)
    many = "more than 1,000 seeds" if count is None else f"about {count} seeds"
    return f"to show a difference of {difference.mean:+.4f}, if it is real, would take {many}"


def comparison_markdown(comparison: Comparison, *, plot: str | None = None) -> str:
    """The whole comparison as a page."""
    lines = scaled_down(comparison)
    parts = [f"# {comparison.title}"]
    made = comparison.record.environment
    if made.command:
        parts.append(
            f"`{made.command}`, commit {made.commit}, {made.threads} threads of {made.processor}, torch {made.torch}, "
            f"{made.time}."
        )
    parts += ["## Loss", lines, markdown(loss_table(comparison)), legend(comparison)]
    parts += ["\n".join(f"- {sentence}" for sentence in verdicts(comparison))]
    if plot is not None:
        parts.append(f"![Validation loss while training, and its difference from {comparison.baseline}]({plot})")
    if (times := time_table(comparison)) is not None:
        parts += ["## Equal time", lines, markdown(times), time_legend(comparison)]
    if (recall := recall_table(comparison)) is not None:
        parts += [
            "## Recall",
            f"{lines} {RECALL_LEGEND}",
            markdown(recall),
        ]
    if (learning := learning_table(comparison)) is not None:
        parts += ["## Speed of learning", LEARNING_LEGEND, markdown(learning)]
    parts += ["## Cost", lines, markdown(cost_table(comparison)), cost_legend(comparison)]
    for table, rows in paper_comparisons(comparison):
        parts += [
            f"## Beside the paper: {table.name}",
            f"{table.citation}.",
            scaled_down(comparison, table),
            markdown(rows),
        ]
    return "\n\n".join(part for part in parts if part) + "\n"


def legend(comparison: Comparison) -> str:
    """How to read the table of losses."""
    return (
        "Losses are in nats a token: the mean over seeds ± half of the 95 % interval (Student's t). Spread is the "
        f"standard deviation between seeds. Differences from {comparison.baseline} are paired by seed: both runs read "
        "the same data in the same order. p comes from the two-sided paired t test; p (Holm) is corrected for the "
        f"number of rows.{averaged_legend(comparison)}"
    )


def averaged_legend(comparison: Comparison) -> str:
    """What is averaged, where weights are."""
    share = comparison.setting.average_share
    if not share:
        return ""
    return (
        f" Weights are averaged over the last {share:.0%} of training; unaveraged is the spread of the last step's own "
        "weights."
    )


def time_legend(comparison: Comparison) -> str:
    """How to read the table of equal time."""
    name, seconds = comparison.baseline, comparison.setting.seconds
    how = (
        f"Every run has the same {seconds:g} processor seconds."
        if seconds is not None
        else f"An arm that ended before {name} keeps its last loss; one that was not ready is read on the line between "
        "its validations, where a falling learning rate has not done its work yet."
    )
    return (
        f"The validation loss when {name} with the same seed ended, by processor seconds of training alone, without "
        f"validation and checkpoints. {how} Differences are paired by seed."
    )


def cost_legend(comparison: Comparison) -> str:
    """How to read the table of costs."""
    workers = comparison.setting.workers
    return (
        "Peak memory is what a cell's process took beyond what it held before its model was made. Time is that of "
        f"training alone, without validation. Cells ran {'one' if workers == 1 else workers} at a time, one arm after "
        "another, so other work on the machine affects speed and time."
    )


def with_interval(value: Estimate | None) -> str:
    """4.1234 ± 0.0123."""
    if value is None:
        return ""
    return f"{value.mean:.4f}" + ("" if value.half_width is None else f" ± {value.half_width:.4f}")


def signed(value: Difference | None) -> str:
    """-0.0321 ± 0.0123."""
    if value is None:
        return ""
    return f"{value.mean:+.4f}" + ("" if value.half_width is None else f" ± {value.half_width:.4f}")


def share(value: Estimate | None) -> str:
    """45.0 % ± 3.1."""
    if value is None:
        return ""
    return f"{value.mean:.1%}" + ("" if value.half_width is None else f" ± {100 * value.half_width:.1f}")


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, whichever reads best."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def millions(count: int) -> str:
    """1.3M, 0.42M, 10B."""
    return f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M"


def all_tables(comparison: Comparison) -> Iterable[tuple[str, str, Table]]:
    """Title, the line that says what was scaled down, and the table; for the terminal."""
    line = scaled_down(comparison)
    yield "loss", line, loss_table(comparison)
    if (times := time_table(comparison)) is not None:
        yield "equal time", line, times
    if (recall := recall_table(comparison)) is not None:
        yield "recall", line, recall
    if (learning := learning_table(comparison)) is not None:
        yield "speed of learning", LEARNING_LEGEND, learning
    yield "cost", line, cost_table(comparison)
    for table, rows in paper_comparisons(comparison):
        yield f"beside the paper: {table.name}", scaled_down(comparison, table), rows
