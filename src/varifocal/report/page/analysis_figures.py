"""What a model's heads read and where its gates differ, from analysis files."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from varifocal.report.analysis import capital, difference_words, is_sure, quantity_name, span
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
from varifocal.results.analysis import Analysis, DistanceShares, Grid, KindRow, Shares, WidthShares

AXES = {"gate": "gate", "width": "width, keys", "distance": "distance, tokens", "window_mass": "share in the window"}


def analysis_figures(name: str, analysis: Analysis) -> list[Figure]:
    """All figures of one analysis."""
    figures = [
        selection_figure(name, analysis),
        distance_figure(name, analysis, analysis.selection.shares, "selection", "How far dense attention looks"),
    ]
    for quantity in analysis.quantities:
        figures += [kind_figure(name, analysis, quantity), position_figure(name, analysis, quantity)]
    figures.append(gain_figure(name, analysis))
    if analysis.width_shares is not None:
        figures.append(width_figure(name, analysis, analysis.width_shares))
    if (shares := analysis.selected_shares) is not None:
        title = "How far away the keys that top-k selected are"
        figures.append(distance_figure(name, analysis, shares, "selected", title))
    return figures


def selection_figure(name: str, analysis: Analysis) -> Figure:
    """Maps of the mass that a window and top-k recover."""
    found = analysis.selection
    recovered = {one: means for one, means in found.recovered().items() if one in ("window", "top-k", "selected")}
    layers, heads, many = analysis.layers, analysis.heads, len(recovered)
    with canvas(many * (1.4 + 0.5 * min(heads, 8)), 1.4 + 0.42 * layers, many, squeeze=False) as (figure, axes):
        for place, (one, means) in zip(axes[0], recovered.items(), strict=True):
            heat_map(figure, place, means.mean, least=0.0, most=1.0, form=".2f")
            place.set_title(one)
        svg = finished(figure)
    kinds = [one for row in found.reach for one in row]
    counts = ", ".join(
        f"{kinds.count(kind)} {kind}" for kind in ("local", "global", "first token", "mixed") if kind in kinds
    )
    told = "; ".join(f"{one} {mean(means.mean):.1%}" for one, means in recovered.items())
    return Figure(
        name=f"{name}_selection",
        title=f"Dense attention that a window of {analysis.window} and top-k recover, {name}, by layer and head",
        svg=svg,
        words=(
            f"Mean over heads, for queries beyond the window: {told}; if a head had no preference, the window would "
            f"hold {found.uniform:.1%}. Heads: {counts}."
        ),
        header=("layer", "head", "reach", *(f"{one}_{side}" for one in recovered for side in ("mean", "low", "high"))),
        rows=[
            [layer, head, found.reach[layer][head],
             *(side[layer][head] for one in recovered.values() for side in (one.mean, one.low, one.high))]
            for layer in range(layers) for head in range(heads)
        ],
        command=analysis.environment.command,
    )  # fmt: skip


def kind_figure(name: str, analysis: Analysis, quantity: str) -> Figure:
    """The difference of each kind of token with its interval."""
    return difference_figure(
        analysis.quantities[quantity].by_kind,
        name=f"{name}_{quantity}_by_kind",
        title=f"{capital(quantity_name(quantity))}, {name}: tokens of a kind against others at equal position",
        axis="difference, with its 95 % interval",
        command=analysis.environment.command,
    )


def gain_figure(name: str, analysis: Analysis) -> Figure:
    """The worth of the text beyond the window, by the kind of the predicted token."""
    return difference_figure(
        analysis.context_gain.by_kind,
        name=f"{name}_context_gain",
        title=f"Worth of the text beyond {analysis.window} tokens, {name}, by kind of predicted token, against others",
        axis="nats, with the 95 % interval",
        command=analysis.environment.command,
    )


def difference_figure(kinds: Sequence[KindRow], *, name: str, title: str, axis: str, command: str) -> Figure:
    """One line for each kind: a filled circle if the difference survives the correction, else a hollow diamond."""
    rows = [row for row in kinds if row.difference is not None]
    sure = [row for row in rows if is_sure(row)]
    reach = shown_reach(rows)
    with canvas(6.0, 1.1 + 0.3 * max(1, len(rows))) as (figure, axes):
        for place, row in enumerate(rows):
            if row.low is not None:
                axes.plot([row.low, row.high], [place, place], color=SERIES[0], linewidth=2.2)
            fill = {"marker": "o"} if row in sure else {"marker": "d", "markerfacecolor": "none"}
            axes.plot([row.difference], [place], color=SERIES[0], markersize=7, **fill)
        axes.axvline(0, color=INK, linewidth=1.0)
        axes.set_yticks(range(len(rows)), [row.kind for row in rows])
        axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)
        axes.set_xlim(-reach, reach)
        few_ticks(axes.xaxis)
        axes.set_xlabel(axis)
        svg = finished(figure)
    told = "; ".join(f"{row.kind} ({difference_words(row)})" for row in sure)
    cut = [row.kind for row in rows if max(abs(side) for side in bounds(row)) > reach]
    words = (
        f"Differences that survive Holm's correction (filled circles): {told}. " if sure else "No difference shown. "
    )
    words += f"{len(rows) - len(sure)} of {len(rows)} kinds show no difference from the others."
    words += f" The intervals of {', '.join(cut)} extend beyond the picture." if cut else ""
    return Figure(
        name=name,
        title=title,
        svg=svg,
        words=words,
        header=KIND_COLUMNS,
        rows=[[getattr(row, one) for one in KIND_COLUMNS] for row in rows],
        command=command,
    )


KIND_COLUMNS = (
    "kind", "against", "tokens", "documents", "mean", "difference", "low", "high", "effect", "p", "p_holm",
)  # fmt: skip


def bounds(row: KindRow) -> tuple[float, float]:
    """The ends of a row's interval; both are its difference if it has no interval."""
    middle = row.difference or 0.0
    return (middle, middle) if row.low is None or row.high is None else (row.low, row.high)


def shown_reach(rows: list[KindRow]) -> float:
    """The limit of the axis: it covers all differences, and the intervals of kinds in at least 5 documents."""
    found = [abs(row.difference or 0) for row in rows]
    found += [abs(side) for row in rows if row.documents >= 5 for side in bounds(row)]
    return 1.1 * max(found, default=0.0) or 1.0


def position_figure(name: str, analysis: Analysis, quantity: str) -> Figure:
    """A quantity by position, with its interval, and the mean of each layer."""
    rows = analysis.quantities[quantity].by_position
    places, layers = range(len(rows)), range(analysis.layers)
    with canvas(5.0, 3.4) as (figure, axes):
        for layer in layers:
            values = [row.layers[layer] for row in rows]
            if any(value is not None for value in values):
                axes.plot(places, [float("nan") if value is None else value for value in values],
                          label=f"layer {layer}", **line_style(layer), alpha=0.75)  # fmt: skip
        axes.plot(places, [row.mean for row in rows], color=INK, linewidth=2.4, label="mean of all heads")
        if rows and all(row.low is not None for row in rows):
            low, high = [row.low for row in rows], [row.high for row in rows]
            axes.fill_between(places, low, high, color=INK, alpha=0.14, linewidth=0)
        axes.set_xticks(places, [span(row.least, row.most) for row in rows], rotation=45, fontsize=9)
        axes.set_xlabel("tokens before")
        axes.set_ylabel(AXES.get(quantity, quantity))
        legend(figure, axes)
        svg = finished(figure)
    told = "; ".join(f"{span(row.least, row.most)}: {row.mean or 0:.3g}" for row in rows)
    return Figure(
        name=f"{name}_{quantity}_by_position",
        title=f"{capital(quantity_name(quantity))}, {name}, by position; the band is the 95 % interval over documents",
        svg=svg,
        words=f"Mean over all heads by the number of tokens before: {told}.",
        header=("least", "most", "tokens", "mean", "low", "high", *(f"layer_{layer}" for layer in layers)),
        rows=[[row.least, row.most, row.tokens, row.mean, row.low, row.high, *row.layers] for row in rows],
        command=analysis.environment.command,
    )


def width_figure(name: str, analysis: Analysis, found: WidthShares) -> Figure:
    """The distribution of widths by layer."""
    bins, edges = list(pairwise(found.edges)), found.edges
    middles = [(low + high) / 2 for low, high in bins]
    layers = shares_by_layer(found.shares)
    means = {layer: sum(m * v for m, v in zip(middles, values, strict=True)) for layer, values in layers.items()}
    told = "; ".join(f"layer {layer} mean {mean:.1f}" for layer, mean in means.items())
    with canvas(5.0, 3.4) as (figure, axes):
        plot_layers(axes, middles, layers)
        axes.set_xlabel("width of the window, keys")
        axes.set_ylabel("share of tokens")
        legend(figure, axes, columns=4)
        svg = finished(figure)
    return Figure(
        name=f"{name}_widths",
        title=f"Distribution of window widths, {name}, by layer",
        svg=svg,
        words=f"Widths between {edges[0]:.1f} and {edges[-1]:.1f} keys: {told}.",
        header=SHARE_COLUMNS,
        rows=share_rows(bins, layers),
        command=analysis.environment.command,
    )


def distance_figure(name: str, analysis: Analysis, found: DistanceShares, what: str, title: str) -> Figure:
    """How far away the keys are that attention weighs, or that top-k selected, by layer."""
    bins, window = found.bins, analysis.window
    layers = shares_by_layer(found.shares)
    beyond = {
        layer: sum(value for (low, _), value in zip(bins, values, strict=True) if low >= window)
        for layer, values in layers.items()
    }
    told = "; ".join(f"layer {layer} {share:.1%}" for layer, share in beyond.items())
    with canvas(5.0, 3.4) as (figure, axes):
        plot_layers(axes, range(len(bins)), layers)
        axes.set_xticks(range(len(bins)), [span(low, high) for low, high in bins], rotation=45, fontsize=9)
        axes.set_xlabel("distance from the query, tokens")
        axes.set_ylabel("share")
        legend(figure, axes, columns=4)
        svg = finished(figure)
    return Figure(
        name=f"{name}_{what}_distances",
        title=f"{title}, {name}, by layer",
        svg=svg,
        words=f"Share at {bin_from(bins, window)} tokens and more: {told}.",
        header=SHARE_COLUMNS,
        rows=share_rows(bins, layers),
        command=analysis.environment.command,
    )


SHARE_COLUMNS = ("layer", "from", "to", "share")


def shares_by_layer(shares: Shares) -> dict[int, list[float]]:
    """The mean over heads for each layer that has shares."""
    means = {layer: over_heads(heads) for layer, heads in enumerate(shares)}
    return {layer: values for layer, values in means.items() if values is not None}


def plot_layers(axes: Any, places: Sequence[float], layers: dict[int, list[float]]) -> None:
    """A line for each layer."""
    for layer, values in layers.items():
        axes.plot(places, values, label=f"layer {layer}", **line_style(layer))


def share_rows(bins: Sequence[tuple[float, float]], layers: dict[int, list[float]]) -> list[list[Cell]]:
    """The numbers of a figure of shares."""
    return [
        [layer, low, high, value]
        for layer, values in layers.items()
        for (low, high), value in zip(bins, values, strict=True)
    ]


def bin_from(bins: Sequence[tuple[int, int]], window: int) -> int:
    """The first distance of the bins that lie beyond the window."""
    return next((low for low, _ in bins if low >= window), bins[-1][1] + 1)


def over_heads(heads: Grid) -> list[float] | None:
    """The mean over heads of shares [H, D]; None if there are none."""
    known = [[one for one in head if one is not None] for head in heads]
    known = [head for head in known if head]
    return [sum(column) / len(known) for column in zip(*known, strict=True)] if known else None


def mean(values: Grid) -> float:
    """The mean of the known values of a map."""
    known = [one for row in values for one in row if one is not None]
    return sum(known) / len(known) if known else float("nan")
