"""What a model's heads read and where its gates differ, from analysis files."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from varifocal.report.analysis import QUANTITY_NAMES, RECOVERED_NAMES, SURE, Analysis, capital, span
from varifocal.report.page.drawing import (
    INK,
    SERIES,
    canvas,
    few_ticks,
    finished,
    heat_map,
    legend,
    line_style,
)
from varifocal.report.page.figure import Cell, Figure

AXES = {"gate": "gate", "width": "width, keys", "distance": "distance, tokens", "window_mass": "share in the window"}


def analysis_figures(name: str, analysis: Analysis) -> list[Figure]:
    """All figures of one analysis."""
    figures = [selection_figure(name, analysis), distance_figure(name, analysis, "selection")]
    for quantity in analysis.quantities:
        figures += [kind_figure(name, analysis, quantity), position_figure(name, analysis, quantity)]
    figures.append(gain_figure(name, analysis))
    if analysis.content.get("width_shares"):
        figures.append(width_figure(name, analysis))
    if analysis.content.get("chosen_shares"):
        figures.append(distance_figure(name, analysis, "chosen"))
    return figures


def selection_figure(name: str, analysis: Analysis) -> Figure:
    """Maps of the mass that a window and top-k recover."""
    found = analysis.content["selection"]
    names = [one for one in ("window", "top_k", "chosen") if one in found]
    layers, heads = analysis.content["layers"], analysis.content["heads"]
    with canvas(len(names) * (1.4 + 0.5 * min(heads, 8)), 1.4 + 0.42 * layers, len(names), squeeze=False) as (
        figure,
        axes,
    ):
        for place, one in zip(axes[0], names, strict=True):
            heat_map(figure, place, found[one]["mean"], least=0.0, most=1.0, form=".2f")
            place.set_title(RECOVERED_NAMES[one])
        svg = finished(figure)
    kinds = [one for row in found["reach"] for one in row]
    counts = ", ".join(
        f"{kinds.count(kind)} {kind}" for kind in ("local", "global", "first token", "mixed") if kind in kinds
    )
    told = "; ".join(f"{RECOVERED_NAMES[one]} {mean(found[one]['mean']):.1%}" for one in names)
    return Figure(
        name=f"{name}_selection",
        title=f"Dense attention that a window of {analysis.window} and top-k recover, {name}, by layer and head",
        svg=svg,
        words=(
            f"In the mean over heads, at queries beyond the window: {told}; without any preference a window would hold "
            f"{found['uniform']:.1%}. Heads: {counts}."
        ),
        header=("layer", "head", "reach", *(f"{one}_{side}" for one in names for side in ("mean", "low", "high"))),
        rows=[
            [layer, head, found["reach"][layer][head],
             *(found[one][side][layer][head] for one in names for side in ("mean", "low", "high"))]
            for layer in range(layers) for head in range(heads)
        ],
        command=analysis.command,
    )  # fmt: skip


def kind_figure(name: str, analysis: Analysis, quantity: str) -> Figure:
    """The difference of each kind of token with its interval."""
    rows = [row for row in analysis.quantities[quantity]["by_kind"] if row["difference"] is not None]
    return difference_figure(
        rows,
        name=f"{name}_{quantity}_by_kind",
        title=f"{capital(QUANTITY_NAMES[quantity])}, {name}: tokens of a kind against others at equal position",
        axis="difference, with its 95 % interval",
        command=analysis.command,
    )


def gain_figure(name: str, analysis: Analysis) -> Figure:
    """What the text beyond the window is worth by the kind of the predicted token."""
    rows = [row for row in analysis.content["context_gain"]["by_kind"] if row["difference"] is not None]
    return difference_figure(
        rows,
        name=f"{name}_context_gain",
        title=f"Worth of the text beyond {analysis.window} tokens, {name}, by kind of predicted token, against others",
        axis="nats, with the 95 % interval",
        command=analysis.command,
    )


def difference_figure(rows: list[dict[str, Any]], *, name: str, title: str, axis: str, command: str) -> Figure:
    """One line for each kind: a filled circle where the difference survives the correction, else a hollow diamond."""
    sure = [row for row in rows if row["p_holm"] is not None and row["p_holm"] < SURE]
    reach = shown_reach(rows)
    with canvas(6.0, 1.1 + 0.3 * max(1, len(rows))) as (figure, axes):
        for place, row in enumerate(rows):
            if row["low"] is not None:
                axes.plot([row["low"], row["high"]], [place, place], color=SERIES[0], linewidth=2.2)
            fill = {"marker": "o"} if row in sure else {"marker": "d", "markerfacecolor": "none"}
            axes.plot([row["difference"]], [place], color=SERIES[0], markersize=7, **fill)
        axes.axvline(0, color=INK, linewidth=1.0)
        axes.set_yticks(range(len(rows)), [str(row["kind"]) for row in rows])
        axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)
        axes.set_xlim(-reach, reach)
        few_ticks(axes.xaxis)
        axes.set_xlabel(axis)
        svg = finished(figure)
    told = "; ".join(
        f"{row['kind']} {row['difference']:+.3g} ({row['low']:+.3g} to {row['high']:+.3g})" for row in sure
    )
    cut = [row["kind"] for row in rows if row["low"] is not None and max(-row["low"], row["high"]) > reach]
    words = (
        f"Differences that survive Holm's correction (filled circles): {told}. " if sure else "No difference shown. "
    )
    words += f"{len(rows) - len(sure)} of {len(rows)} kinds are not told apart from the others."
    words += f" The intervals of {', '.join(cut)} reach beyond the picture." if cut else ""
    return Figure(
        name=name,
        title=title,
        svg=svg,
        words=words,
        header=KIND_COLUMNS,
        rows=[[row[one] for one in KIND_COLUMNS] for row in rows],
        command=command,
    )


KIND_COLUMNS = (
    "kind", "against", "tokens", "documents", "mean", "difference", "low", "high", "effect", "p", "p_holm",
)  # fmt: skip


def shown_reach(rows: list[dict[str, Any]]) -> float:
    """How far the picture reaches: over all differences, and the intervals of kinds that at least 5 documents have."""
    common = [row for row in rows if row["low"] is not None and row["documents"] >= 5]
    found = [abs(row["difference"]) for row in rows] + [abs(row[side]) for row in common for side in ("low", "high")]
    return 1.1 * max(found, default=0.0) or 1.0


def position_figure(name: str, analysis: Analysis, quantity: str) -> Figure:
    """A quantity by position, with its interval, and each layer's."""
    rows = analysis.quantities[quantity]["by_position"]
    places = range(len(rows))
    layers = range(analysis.content["layers"])
    with canvas(5.0, 3.4) as (figure, axes):
        for layer in layers:
            values = [row["layers"][layer] for row in rows]
            if any(value is not None for value in values):
                axes.plot(places, [float("nan") if value is None else value for value in values],
                          label=f"layer {layer}", **line_style(layer), alpha=0.75)  # fmt: skip
        axes.plot(places, [row["mean"] for row in rows], color=INK, linewidth=2.4, label="mean of all heads")
        if rows and all(row["low"] is not None for row in rows):
            axes.fill_between(
                places, [row["low"] for row in rows], [row["high"] for row in rows], color=INK, alpha=0.14, linewidth=0
            )
        axes.set_xticks(places, [span(row["least"], row["most"]) for row in rows], rotation=45, fontsize=9)
        axes.set_xlabel("tokens before")
        axes.set_ylabel(AXES[quantity])
        legend(figure, axes)
        svg = finished(figure)
    told = "; ".join(f"{span(row['least'], row['most'])}: {row['mean']:.3g}" for row in rows)
    return Figure(
        name=f"{name}_{quantity}_by_position",
        title=f"{capital(QUANTITY_NAMES[quantity])}, {name}, by position; the band is the 95 % interval over documents",
        svg=svg,
        words=f"Mean over all heads by the number of tokens before: {told}.",
        header=("least", "most", "tokens", "mean", "low", "high", *(f"layer_{layer}" for layer in layers)),
        rows=[
            [*(row[one] for one in ("least", "most", "tokens", "mean", "low", "high")), *row["layers"]] for row in rows
        ],
        command=analysis.command,
    )  # fmt: skip


def width_figure(name: str, analysis: Analysis) -> Figure:
    """The distribution of widths by layer."""
    edges, shares = (analysis.content["width_shares"][one] for one in ("edges", "shares"))
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    rows: list[list[Cell]] = []
    told = []
    with canvas(5.0, 3.4) as (figure, axes):
        for layer, heads in enumerate(shares):
            values = over_heads(heads)
            if values is None:
                continue
            axes.plot(middles, values, label=f"layer {layer}", **line_style(layer))
            rows += [[layer, low, high, value] for (low, high), value in zip(pairwise(edges), values, strict=True)]
            told.append(f"layer {layer} mean {sum(m * v for m, v in zip(middles, values, strict=True)):.1f}")
        axes.set_xlabel("width of the window, keys")
        axes.set_ylabel("share of tokens")
        legend(figure, axes, columns=4)
        svg = finished(figure)
    return Figure(
        name=f"{name}_widths",
        title=f"Distribution of window widths, {name}, by layer",
        svg=svg,
        words=f"Widths between {edges[0]:.1f} and {edges[-1]:.1f} keys: {'; '.join(told)}.",
        header=("layer", "from", "to", "share"),
        rows=rows,
        command=analysis.command,
    )


def distance_figure(name: str, analysis: Analysis, what: str) -> Figure:
    """How far the keys lie that attention weighs ("selection") or that top-k chose ("chosen"), by layer."""
    found = analysis.content["selection"]["shares"] if what == "selection" else analysis.content["chosen_shares"]
    bins, shares = found["bins"], found["shares"]
    rows: list[list[Cell]] = []
    told = []
    with canvas(5.0, 3.4) as (figure, axes):
        for layer, heads in enumerate(shares):
            values = over_heads(heads)
            if values is None:
                continue
            axes.plot(range(len(bins)), values, label=f"layer {layer}", **line_style(layer))
            rows += [[layer, low, high, value] for (low, high), value in zip(bins, values, strict=True)]
            beyond = sum(value for (low, _), value in zip(bins, values, strict=True) if low >= analysis.window)
            told.append(f"layer {layer} {beyond:.1%}")
        axes.set_xticks(range(len(bins)), [span(low, high) for low, high in bins], rotation=45, fontsize=9)
        axes.set_xlabel("distance from the query, tokens")
        axes.set_ylabel("share")
        legend(figure, axes, columns=4)
        svg = finished(figure)
    title = "How far dense attention looks" if what == "selection" else "How far the keys lie that top-k chose"
    return Figure(
        name=f"{name}_{what}_distances",
        title=f"{title}, {name}, by layer",
        svg=svg,
        words=f"Share at {bin_from(bins, analysis.window)} tokens and more: {'; '.join(told)}.",
        header=("layer", "from", "to", "share"),
        rows=rows,
        command=analysis.command,
    )


def bin_from(bins: list[list[int]], window: int) -> int:
    """The first distance of the bins that lie beyond the window."""
    return next((low for low, _ in bins if low >= window), bins[-1][1] + 1)


def over_heads(heads: list[list[float | None]]) -> list[float] | None:
    """The mean over heads of shares [H, D]; None if there are none."""
    known = [[one for one in head if one is not None] for head in heads]
    known = [head for head in known if head]
    return [sum(column) / len(known) for column in zip(*known, strict=True)] if known else None


def mean(values: list[list[float | None]]) -> float:
    """The mean of what is known of a map."""
    known = [one for row in values for one in row if one is not None]
    return sum(known) / len(known) if known else float("nan")
