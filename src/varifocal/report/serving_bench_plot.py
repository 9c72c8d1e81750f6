"""The picture of a serving benchmark: what fits, how fast requests are answered, and the memory for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from varifocal.results.serving_bench import ServingBench


def plot_serving_bench(bench: ServingBench, path: Path) -> None:
    """Draw bars for every contender; the suffix sets the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [row.name for row in bench.capacities]
    figure, panels = pyplot.subplots(1, 4, figsize=(12, 3.6), layout="constrained")
    shown: list[tuple[str, list[float], str]] = [
        (
            f"tokens in {bench.cache_bytes / 1e6:,.0f} MB of cache\n(texts of {bench.context:,})",
            [row.tokens for row in bench.capacities],
            "{:,.0f}",
        ),
        ("requests a second,\nroom for all", [row.requests_per_second for row in bench.of("room")], "{:.3f}"),
        ("requests a second,\na small cache", [row.requests_per_second for row in bench.of("limited")], "{:.3f}"),
        ("peak memory with room for all,\nMB", [row.peak_bytes / 1e6 for row in bench.of("room")], "{:,.0f}"),
    ]
    for axes, (title, values, words) in zip(panels, shown, strict=True):
        draw_bars(axes, names, values, words)
        axes.set_title(title, fontsize=10)
    shared = bench.environment
    figure.suptitle(
        f"{bench.requests} requests of {bench.prompt + bench.new_tokens:,} tokens at once, {bench.engine}, "
        f"{bench.dtype}, {shared.threads} threads",
        fontsize=11,
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_bars(axes: Any, names: list[str], values: list[float], words: str) -> None:
    """A bar for each name, with its value and, from the second on, the ratio to the first."""
    places = range(len(names))
    axes.bar(places, values, color=["0.45"] + [f"C{number % 10}" for number in range(len(names) - 1)], width=0.65)
    for place, value in enumerate(values):
        ratio = f"\n{value / values[0]:.2f}x" if place else ""
        axes.text(place, value, words.format(value) + ratio, ha="center", va="bottom", fontsize=8.5)
    axes.set_xticks(list(places), names, fontsize=9)
    axes.set_ylim(0, 1.25 * max(values))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", labelsize=8)
