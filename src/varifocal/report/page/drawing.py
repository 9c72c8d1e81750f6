"""matplotlib's figures as SVG that takes its colours from the page, so that one picture fits light and dark pages."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

INK = "#010101"
"""A placeholder for the colour of the text around the figure."""
SERIES = ("#0072b2", "#d55e00", "#00805d", "#aa3f84", "#a06000", "#3a87ad")
"""Placeholders for the page's colours of series 1 to 6, with their values on a light page. Colour-blind readers can
tell them apart, and each line also has its own marker and dash."""
MARKERS = "os^Dv<>PX*"
DASHES = ("-", "--", "-.", ":")
FAR, EVEN, NEAR = "#1f6fae", "#f2f1ee", "#d55e00"
"""A diverging scale around the middle, from far over undecided to near; colour-blind readers tell its ends apart."""
OWN_ID = "figure-id-"
"""The prefix of every id of an SVG; the page replaces it by one that no other figure has."""

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "varifocal",
    "font.size": 11.0,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 11.0,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.grid": True,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 10.0,
    "text.parse_math": False,
}


@contextmanager
def canvas(width: float, height: float, columns: int = 1, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A figure of that size in inches and its axes (an array for several columns); it is closed at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(STYLE):
        figure, axes = pyplot.subplots(1, columns, figsize=(width, height), layout="constrained", **options)
        try:
            yield figure, axes
        finally:
            pyplot.close(figure)


def line_style(number: int) -> dict[str, Any]:
    """Colour, marker and dash of a series, by its number."""
    return {
        "color": SERIES[number % len(SERIES)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": DASHES[number // len(SERIES) % len(DASHES)],
        "markersize": 4.5,
        "linewidth": 1.6,
    }


def finished(figure: Any) -> str:
    """The figure as SVG to put into an HTML page: no header, no size, the page's colours, marked ids."""
    content = io.StringIO()
    figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = content.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    width, _ = figure.get_size_inches()
    svg = re.sub(r' (?:width|height)="[^"]*pt"| xmlns(?::\w+)?="[^"]*"| version="[^"]*"', "", svg)
    svg = svg.replace("xlink:href=", "href=")
    svg = with_own_ids(svg).replace(INK, "currentColor")
    for number, color in enumerate(SERIES):
        svg = svg.replace(color, f"var(--series-{number + 1})")
    # A small figure must not be stretched to the width of the page.
    return svg.strip().replace("<svg", f'<svg style="--natural: {width * 6.2:.1f}rem"', 1)


def with_own_ids(svg: str) -> str:
    """The SVG with only those ids that something in it refers to, each once and with the prefix OWN_ID."""
    wanted = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))

    def kept(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in wanted:
            return ""
        wanted.remove(name)
        return f' id="{OWN_ID}{name}"'

    svg = re.sub(r'\s+id="([^"]*)"', kept, svg)
    return re.sub(r'(href="#|url\(#)', rf"\g<1>{OWN_ID}", svg)


def legend(figure: Any, axes: Any, *, columns: int = 3) -> None:
    """Put the names of the series above the axes, where they cover no line."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper left", ncols=min(columns, len(handles)))


def plain_numbers(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers."""
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(lambda value, _: "")


def few_ticks(axis: Any) -> None:
    """Use so few labels that they do not run into each other."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(5))


def heat_map(
    figure: Any, axes: Any, values: Sequence[Sequence[float | None]], *, least: float, most: float, form: str
) -> None:
    """Draw a map with layers downwards and heads to the right, and with numbers in the cells if there is room."""
    shown = shaded(figure, axes, values, least=least, most=most)
    axes.invert_yaxis()
    rows, columns = shown.shape
    axes.set_xticks([0.5 + one for one in range(columns)], [str(one) for one in range(columns)])
    axes.set_yticks([0.5 + one for one in range(rows)], [str(one) for one in range(rows)])
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    if columns > 8:
        return
    for row in range(rows):
        for column in range(columns):
            place = (shown[row, column] - least) / (most - least)
            # NaN is neither.
            if 0 <= place <= 1:
                color = "#000000" if 0.12 < place < 0.88 else "#ffffff"
                text = format(shown[row, column], form)
                axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=color, fontsize=9.5)


def shaded(
    figure: Any,
    axes: Any,
    values: Sequence[Sequence[float | None]],
    *,
    least: float,
    most: float,
    label: str = "",
    reverse: bool = False,
) -> Any:
    """Colour a map on the diverging scale, with a bar that tells it; returns the values as an array.

    Args:
        figure: the figure.
        axes: where to draw.
        values: row by row; None is left blank.
        least: the value of the far end of the scale.
        most: that of its near end.
        label: what the bar tells.
        reverse: the bar tells least + most - value.
    """
    import numpy
    from matplotlib.colors import LinearSegmentedColormap

    shown = numpy.array([[numpy.nan if one is None else one for one in row] for row in values], dtype=float)
    scale = LinearSegmentedColormap.from_list("far to near", (FAR, EVEN, NEAR))
    mesh = axes.pcolormesh(shown, cmap=scale, vmin=least, vmax=most, edgecolors="none")
    axes.grid(visible=False)
    axes.tick_params(length=0)
    bar = figure.colorbar(mesh, ax=axes, fraction=0.06, pad=0.03)
    bar.outline.set_visible(False)
    if reverse:
        bar.ax.yaxis.set_major_formatter(lambda value, _: f"{least + most - value:g}")
        bar.ax.invert_yaxis()
    if label:
        bar.set_label(label)
    return shown
