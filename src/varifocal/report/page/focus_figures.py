"""A focused model in figures: its map of heads, what it loses and where, and the facts that it still finds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from varifocal.report.focus import DENSE, compared_losses, kept_facts, rise
from varifocal.report.page.drawing import INK, SERIES, canvas, few_ticks, finished, legend, line_style, shaded
from varifocal.report.page.figure import Cell, Figure
from varifocal.results.estimates import Difference
from varifocal.results.focus import FocusMap, FocusMeasure, MapLosses
from varifocal.statistics.estimates import paired_difference

RING = "#000000"
"""Not the colour of the text, which is white on a dark page: the shades of the map are the same on both."""
FIFTHS, EIGHTHS = 5, 8
"""Parts of a text by which facts and losses are told."""


def map_figure(record: FocusMap) -> Figure:
    """Every key head by layer: its score by colour, and a ring around those that read everything."""
    layers = max(head.layer for head in record.heads) + 1
    heads = max(head.head for head in record.heads) + 1
    scores = [[0.0] * layers for _ in range(heads)]
    for one in record.heads:
        scores[one.head][one.layer] = one.score
    shares = record.fit.get("way") != "calibrate"
    least, most = (0.0, 1.0) if shares else (min(map(min, scores)), max(map(max, scores)))
    full = [one for one in record.heads if one.window is None]
    with canvas(2.2 + 0.26 * layers, 1.5 + 0.34 * heads) as (figure, axes):
        shaded(figure, axes, [[1 - score for score in row] for row in scores] if shares else scores,
               least=least, most=most, label="score, 1 = far" if shares else "score", reverse=shares)  # fmt: skip
        axes.scatter([one.layer + 0.5 for one in full], [one.head + 0.5 for one in full], s=46, marker="o",
                     facecolors="none", edgecolors=RING, linewidths=1.6)  # fmt: skip
        step = max(1, layers // 15)
        axes.set_xticks([0.5 + one for one in range(0, layers, step)], [str(one) for one in range(0, layers, step)])
        axes.set_yticks([0.5 + one for one in range(heads)], [str(one) for one in range(heads)])
        axes.set_xlabel("layer")
        axes.set_ylabel("key head")
        svg = finished(figure)
    by_layer = [sum(one.layer == layer for one in full) for layer in range(layers)]
    most_layers = [str(layer) for layer, count in enumerate(by_layer) if count == max(by_layer)]
    none = sum(count == 0 for count in by_layer)
    return Figure(
        name="focus_map",
        title="Which key heads read everything (ringed), and the score that decided it",
        svg=svg,
        words=(
            f"{len(full)} of {len(record.heads)} key heads read everything, by {record.decided_by}; the others keep "
            f"{record.fit.get('window')} keys and the first {record.sinks} tokens. Most of them are in layer"
            f"{'s' if len(most_layers) > 1 else ''} {', '.join(most_layers)} ({max(by_layer)} each); {none} layers "
            "have windows only."
        ),
        header=("layer", "head", "score", "window"),
        rows=[[one.layer, one.head, one.score, one.window] for one in record.heads],
        command=command_of(record),
    )


def cost_figure(measured: FocusMeasure) -> Figure:
    """The rise of the loss of every map that was measured, with its interval."""
    compared = compared_losses(measured)
    several = len({(row.texts, row.length) for row, _ in compared}) > 1
    rows = [
        (f"{row.name}, keeps {row.keep:.0%}" + (f", {row.texts} {row.length}" if several else ""), rise(row, dense))
        for row, dense in compared
    ]
    best, least = min(rows, key=lambda one: one[1].mean)
    first = compared[0][1]
    return dots(
        rows,
        name="focus_cost",
        title=f"Rise of the loss over dense, {len(first.documents)} texts of {first.length} tokens ({first.texts})",
        axis="nats a token (95 % interval over texts)",
        words=f"The lowest rise is {least.mean:+.4f}: {best}.",
        command=command_of(measured),
    )


def curve_figure(measured: FocusMeasure) -> Figure | None:
    """Quality against cache: the rise of the loss by the bytes that are left; None for fewer than three shares."""
    compared = compared_losses(measured)
    if not compared or not measured.caches:
        return None
    first = compared[0][0]
    shares = cache_shares(measured)
    points = [
        (row.name, row.keep, shares[row.name, row.keep], rise(row, dense))
        for row, dense in compared
        if (row.texts, row.length) == (first.texts, first.length) and (row.name, row.keep) in shares
    ]
    names = list(dict.fromkeys(name for name, keep, _, _ in points if keep > 0))
    by_name = {
        name: sorted((one for one in points if one[0] == name or one[1] == 0), key=lambda one: one[1]) for name in names
    }
    if max((len(rows) for rows in by_name.values()), default=0) < 4:
        return None
    with canvas(6.0, 3.6) as (figure, axes):
        for number, (name, rows) in enumerate(by_name.items()):
            axes.errorbar(
                [share for _, _, share, _ in rows], [one.mean for _, _, _, one in rows],
                yerr=[one.half_width or 0 for _, _, _, one in rows], capsize=3, label=name, **line_style(number),
            )  # fmt: skip
        axes.axhline(0, color=INK, linewidth=1.0)
        axes.set_xlabel("cache of the longest text measured, dense = 1")
        axes.set_ylabel("rise of the loss, nats a token")
        legend(figure, axes)
        svg = finished(figure)
    return Figure(
        name="focus_curve",
        title="Quality against cache",
        svg=svg,
        words="The further left, the smaller the cache; the lower, the less is lost.",
        header=("map", "keep", "cache", "rise", "half_width"),
        rows=[[name, keep, share, one.mean, one.half_width] for name, keep, share, one in points],
        command=command_of(measured),
    )


def cache_shares(measured: FocusMeasure) -> dict[tuple[str, float], float]:
    """By map and share, the bytes of its longest cache against dense."""
    dense = next((one for one in measured.caches if one.name == DENSE), None)
    if dense is None or not dense.bytes:
        return {}
    length = str(max(map(int, dense.bytes)))
    return {
        (one.name, one.keep): one.bytes[length] / dense.bytes[length] for one in measured.caches if length in one.bytes
    }


def facts_figure(measured: FocusMeasure, name: str, keep: float) -> Figure | None:
    """Facts found by where they stand; None if no facts were asked for."""
    wanted = [(name, keep), ("random", keep), ("all windowed", 0.0)]
    shown = {}
    for one in wanted:
        known = [kept_facts(measured, row) for row in measured.facts if (row.name, row.keep) == one]
        pairs = [pair for depths, found in known for pair in zip(depths, found, strict=True)]
        if pairs:
            shown[one] = pairs
    if not shown:
        return None
    by_map = {
        one: [
            [found for depth, found in pairs if min(FIFTHS - 1, int(depth * FIFTHS)) == part] for part in range(FIFTHS)
        ]
        for one, pairs in shown.items()
    }
    with canvas(6.0, 3.0) as (figure, axes):
        for number, ((label, share), parts) in enumerate(by_map.items()):
            axes.bar(
                [place + (number - (len(shown) - 1) / 2) * 0.27 for place in range(FIFTHS)],
                [sum(part) / len(part) + 0.012 if part else 0.0 for part in parts], width=0.25, color=SERIES[number],
                label=f"{label}, keeps {share:.0%}",
            )  # fmt: skip
        step = 100 // FIFTHS
        axes.set_xticks(range(FIFTHS), [f"{step * place} to {step * (place + 1)}" for place in range(FIFTHS)])
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("where the fact stands, in % of the text")
        axes.set_ylabel("share found")
        axes.grid(visible=False, axis="x")
        legend(figure, axes, columns=2)
        svg = finished(figure)
    told = "; ".join(
        f"{label} {sum(found for _, found in pairs)} of {len(pairs)}" for (label, _), pairs in shown.items()
    )
    return Figure(
        name="focus_facts",
        title="Facts found by their depth in the text, of those that the dense model finds",
        svg=svg,
        words=f"In all: {told}.",
        header=("map", "keep", "fifth", "found", "asked"),
        rows=[
            [label, share, place, sum(part), len(part)]
            for (label, share), parts in by_map.items()
            for place, part in enumerate(parts)
        ],
        command=command_of(measured),
    )


def position_figure(measured: FocusMeasure, row: MapLosses, dense: MapLosses) -> Figure | None:
    """The rise of the loss along the texts."""
    stretches = len(dense.documents[0])
    if stretches % EIGHTHS:
        return None
    each = stretches // EIGHTHS

    def part(those: MapLosses, number: int) -> list[float]:
        return [sum(one[number * each : (number + 1) * each]) / each for one in those.documents]

    found = [paired_difference(part(row, number), part(dense, number)) for number in range(EIGHTHS)]
    edges = [round(row.length * number / EIGHTHS) for number in range(EIGHTHS + 1)]
    labels = [f"tokens {low:,} to {high - 1:,}" for low, high in pairwise(edges)]
    return dots(
        list(zip(labels, found, strict=True)),
        name="focus_by_position",
        title="Rise of the loss along the text",
        axis="nats a token (95 % interval over texts)",
        words=(
            f"In the first eighth of the texts {found[0].mean:+.4f}, in the last {found[-1].mean:+.4f}. Windows read "
            "the same as everything until they are full."
        ),
        command=command_of(measured),
    )


def kind_figure(measured: FocusMeasure, row: MapLosses, dense: MapLosses) -> Figure | None:
    """The rise of the loss by kind of token."""
    found: list[tuple[str, Difference]] = []
    for kind, ours in (row.kinds or {}).items():
        theirs = (dense.kinds or {}).get(kind, ())
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if a is not None and b is not None]
        if len(pairs) > 1:
            count = (row.kind_tokens or {}).get(kind, 0)
            found.append((f"{kind} ({count:,})", paired_difference([a for a, _ in pairs], [b for _, b in pairs])))
    if not found:
        return None
    sure = [one for one in found if one[1].excludes_zero]
    told = "No kind of token is shown to lose: every interval holds 0."
    if sure:
        worst, most = max(sure, key=lambda one: one[1].mean)
        told = (
            f"Of the kinds whose interval leaves out 0, “{worst}” loses most: {most.mean:+.4f} ± {most.half_width:.4f}."
        )
    return dots(
        found,
        name="focus_by_kind",
        title="Rise of the loss by kind of token (how many there are)",
        axis="nats a token (95 % interval over texts)",
        words=(f"{told} “Stood back” counts to the last time that the same token stood in the text."),
        command=command_of(measured),
    )


def dots(
    rows: Sequence[tuple[str, Difference]], *, name: str, title: str, axis: str, words: str, command: str
) -> Figure:
    """A line for each row: a filled circle if its interval excludes 0, else a hollow one."""
    with canvas(6.0, 1.1 + 0.3 * max(1, len(rows))) as (figure, axes):
        for place, (_, one) in enumerate(rows):
            if one.interval is not None:
                axes.plot(one.interval, [place, place], color=SERIES[0], linewidth=2.2)
            fill = {} if one.excludes_zero else {"markerfacecolor": "none"}
            axes.plot([one.mean], [place], color=SERIES[0], marker="o", markersize=7, **fill)
        axes.axvline(0, color=INK, linewidth=1.0)
        axes.set_yticks(range(len(rows)), [label for label, _ in rows])
        axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)
        few_ticks(axes.xaxis)
        # Below long names the axis is short; its label grows to the left.
        axes.set_xlabel(axis, loc="right")
        svg = finished(figure)
    cells: list[list[Cell]] = [[label, one.mean, one.half_width, one.count] for label, one in rows]
    return Figure(
        name=name, title=title, svg=svg, words=words, header=("what", "rise", "half_width", "count"), rows=cells,
        command=command,
    )  # fmt: skip


def gates_figure(record: FocusMap) -> Figure | None:
    """The gates after every step of the fit."""
    if not record.traces:
        return None
    steps = range(1, len(record.traces) + 1)
    full = [head.window is None for head in record.heads]
    with canvas(6.0, 3.2) as (figure, axes):
        for number, reads in enumerate(full):
            values = [one[number] for one in record.traces]
            axes.plot(steps, values, color=SERIES[0 if reads else 1], alpha=0.5, linewidth=1.0)
        axes.set_ylim(0, 1)
        axes.set_xlabel("step")
        axes.set_ylabel("share of the whole text")
        svg = finished(figure)
    last = record.traces[-1]
    sure = sum(one < 0.1 or one > 0.9 for one in last)
    return Figure(
        name="focus_gates",
        title="Gates over the fit: blue ones ended as heads that read everything, orange ones as windows",
        svg=svg,
        words=f"At the end {sure} of {len(last)} gates are below 0.1 or above 0.9; the cut lies between the others.",
        header=("step", *(f"{head.layer}.{head.head}" for head in record.heads)),
        rows=[[step, *values] for step, values in zip(steps, record.traces, strict=True)],
        command=command_of(record),
    )


def command_of(record: FocusMap | FocusMeasure) -> str:
    """The command that made a file."""
    return record.environment.command if record.environment is not None else ""
