"""A comparison as tables: losses, costs, recall, and the papers' own numbers beside ours."""

from __future__ import annotations

from collections.abc import Iterable

from varifocal.report.attention_bench import markdown
from varifocal.results.papers import PaperTable, paper_tables
from varifocal.statistics.comparison import ArmResult, Comparison
from varifocal.statistics.estimates import Difference, Estimate

Table = list[list[str]]


def without_empty_columns(table: Table) -> Table:
    """The table without columns that no row fills, such as p for one seed."""
    header, *body = table
    kept = [number for number in range(len(header)) if number == 0 or any(row[number] for row in body)]
    return [[row[number] for number in kept] for row in table]


def loss_table(comparison: Comparison) -> Table:
    """Header and rows: losses, and the paired difference to the baseline with its p-value."""
    results = comparison.results
    ablates = any(result.reference is not None for result in results)
    tested = any(result.test_loss is not None for result in results)
    header = ["", "seeds", "validation loss", "spread", f"to {comparison.baseline}", "p", "p (Holm)"]
    header += ["to its full form", "p"] if ablates else []
    header += ["bits per byte", *(["test loss"] if tested else [])]
    body = []
    for result in results:
        row = [
            result.name,
            str(len(result.seeds)),
            with_interval(result.validation_loss),
            "" if result.validation_loss.deviation is None else f"{result.validation_loss.deviation:.4f}",
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


def recall_table(comparison: Comparison) -> Table | None:
    """Header and rows: the share of right answers by distance; None if the data are no probe."""
    results = [result for result in comparison.results if result.recall]
    if not results:
        return None
    distances = sorted({distance for result in results for distance in result.recall}, key=int)
    body = [
        [result.name, *(share(result.recall.get(distance)) for distance in distances)] for result in results
    ]  # fmt: skip
    return [["right answers at distance", *distances], *body]


def paper_comparisons(comparison: Comparison) -> list[tuple[PaperTable, Table]]:
    """The papers' tables of which we ran the baseline and something else, each with our numbers beside theirs."""
    known = {result.name: result for result in comparison.results}
    shown = []
    for table in paper_tables():
        names = [row.mechanism for row in table.rows]
        # A table of ablations is shown where one of them was run.
        asked = [name for name in names if "." in name] or names[1:]
        if names[0] in known and any(name in known for name in asked):
            shown.append((table, beside(table, known)))
    return shown


def beside(table: PaperTable, known: dict[str, ArmResult]) -> Table:
    """A paper's rows with ours: its columns as printed, then our loss, our memory, speed or time."""
    base = table.rows[0].number(table.loss)
    assert base is not None
    header = [
        "",
        *(f"paper: {column}" for column in table.columns),
        "paper: to baseline",
        "ours: loss",
        "ours: to dense",
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
    setting = comparison.setting
    few, many = setting["parameters"]
    sizes = f"{millions(few)}" if millions(few) == millions(many) else f"{millions(few)} to {millions(many)}"
    seeds = comparison.content["seeds"]
    parts = [
        f"{sizes} parameters",
        f"{setting['data']}, {millions(setting['tokens'])} tokens of training",
        f"batches of {setting['batch']} texts of {setting['length']} tokens",
        f"{setting['precision']}" if setting["precision"] else "",
        f"{len(seeds)} seed{'' if len(seeds) == 1 else 's'}",
    ]
    return ", ".join(part for part in parts if part)


def scaled_down(comparison: Comparison, table: PaperTable | None = None) -> str:
    """One line: what was scaled down, against one paper or against all of them."""
    if table is None:
        papers = "132M to 134M parameters on FineWeb, 10B tokens or 50,000 steps, one run each"
    else:
        names = {"batch": "batches of {}", "rate": "learning rate {}", "window": "window {}", "data": "{}"}
        setting = {name: names.get(name, "{} parameters").format(value) for name, value in table.setting.items()}
        papers = ", ".join(setting.values())
    return f"Scaled down: ours has {our_setting(comparison)}; the paper{'s' if table is None else ''}: {papers}."


def verdicts(comparison: Comparison) -> list[str]:
    """A sentence for each arm, that claims no more than the intervals support."""
    return [
        verdict(result.name, comparison.baseline, result.difference)
        for result in comparison.results
        if result.name != comparison.baseline
    ] + [
        verdict(result.name, result.reference, result.to_reference)
        for result in comparison.results
        if result.reference not in (None, comparison.baseline)
    ]


def verdict(name: str, other: str | None, difference: Difference | None) -> str:
    """What the difference between two arms allows to say."""
    if difference is None:
        return f"{name}: no seed in common with {other}, nothing can be said."
    if difference.half_width is None:
        return f"{name}: {difference.mean:+.4f} against {other} with one seed; nothing can be said of its spread."
    low, high = difference.mean - difference.half_width, difference.mean + difference.half_width
    if difference.mean == 0 and difference.half_width == 0:
        return f"{name}: exactly as {other} in every seed."
    where = f"95 % interval {low:+.4f} to {high:+.4f} over {difference.count} seeds"
    if not difference.excludes_zero:
        return f"{name}: not told apart from {other} ({where})."
    lower = "lower" if difference.mean < 0 else "higher"
    return f"{name}: {lower} loss than {other} by {abs(difference.mean):.4f} ({where})."


def comparison_markdown(comparison: Comparison, *, plot: str | None = None) -> str:
    """The whole comparison as a page."""
    title = comparison.content["title"]
    lines = scaled_down(comparison)
    parts = [f"# {title}"]
    if environment := comparison.content.get("environment"):
        parts.append(
            f"`{environment['command']}`, commit {environment['commit']}, {environment['threads']} threads of "
            f"{environment['processor']}, torch {environment['torch']}, {environment['time']}."
        )
    parts += ["## Loss", lines, markdown(loss_table(comparison)), legend(comparison)]
    parts += ["\n".join(f"- {sentence}" for sentence in verdicts(comparison))]
    if plot is not None:
        parts.append(f"![Validation loss while training, and its difference to {comparison.baseline}]({plot})")
    if (recall := recall_table(comparison)) is not None:
        parts += ["## Recall", f"{lines} The share of questions answered rightly, test split.", markdown(recall)]
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
        "Losses in nats a token: mean over seeds ± half of the 95 % interval (Student's t); spread is the standard "
        f"deviation between seeds. Differences to {comparison.baseline} are paired by seed, same data in the same "
        "order; p is that of the two-sided paired t test, Holm's corrects it for the number of rows."
    )


def cost_legend(comparison: Comparison) -> str:
    """How to read the table of costs."""
    workers = comparison.setting["workers"]
    return (
        "Peak memory is what a cell's process took above what stood before its model was made; time is that of "
        f"training alone, without validation. Cells ran {'one' if workers == 1 else workers} at a time, the arms one "
        "after the other: whatever else the machine did shows in speed and time."
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


def p_text(p_value: float | None) -> str:
    """Three decimals, or that it is smaller."""
    return "" if p_value is None else f"{p_value:.3f}" if p_value >= 0.001 else "<0.001"


def ratio(value: float | None) -> str:
    """1.05x."""
    return "" if value is None else f"{value:.2f}x"


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
    if (recall := recall_table(comparison)) is not None:
        yield "recall", line, recall
    yield "cost", line, cost_table(comparison)
    for table, rows in paper_comparisons(comparison):
        yield f"beside the paper: {table.name}", scaled_down(comparison, table), rows
