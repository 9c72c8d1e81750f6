"""The picture of a comparison: validation loss while training, and how far each arm lies from the baseline."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from varifocal.results.estimates import Estimate
from varifocal.statistics.comparison import Comparison
from varifocal.statistics.estimates import estimate, paired_difference

Curve = list[tuple[int, Estimate]]


def plot_comparison(comparison: Comparison, path: Path) -> None:
    """Draw means over seeds with their 95 % intervals as bands; the file's suffix sets the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = any(cell.time_curve for cell in comparison.record.cells)
    figure, places = pyplot.subplots(1, 3 if timed else 2, figsize=(18 if timed else 12, 4.8), layout="constrained")
    losses, differences = places[:2]
    for number, result in enumerate(comparison.results):
        baseline = result.name == comparison.baseline
        color = "black" if baseline else f"C{number % 10}"
        style = {"color": color, "linewidth": 2.0 if baseline else 1.5, "linestyle": "-" if number < 10 else "--"}
        curves = [(losses, loss_curve(comparison, result.name))]
        if not baseline:
            curves.append((differences, difference_curve(comparison, result.name)))
        for axes, curve in curves:
            tokens = [count / 1e6 for count, _ in curve]
            axes.plot(tokens, [point.mean for _, point in curve], label=result.name, marker=".", **style)
            bounds = [point.interval for _, point in curve]
            if all(bound is not None for bound in bounds):
                low, high = ([bound[side] for bound in bounds if bound is not None] for side in (0, 1))
                axes.fill_between(tokens, low, high, color=color, alpha=0.12, linewidth=0)
    if timed:
        draw_by_time(comparison, places[2])
    differences.axhline(0, color="black", linewidth=1.0)
    differences.set_title(f"difference from {comparison.baseline}, paired by seed", fontsize=11)
    losses.set_title("validation loss, nats a token", fontsize=11)
    zoom(losses)
    for axes in (losses, differences):
        axes.set_xlabel("million tokens of training")
        axes.grid(alpha=0.3)
    losses.legend(fontsize=8)
    seeds = len(comparison.record.seeds)
    figure.suptitle(
        f"{comparison.title}: mean of {seeds} seed{'' if seeds == 1 else 's'}"
        + (", bands are 95 % intervals" if seeds > 1 else ""),
        fontsize=11,
    )
    # The picture is written beside and renamed; it keeps its suffix, which decides the format.
    beside = path.with_name(f".part-{path.name}")
    try:
        figure.savefig(beside, dpi=120)
        beside.replace(path)
    finally:
        pyplot.close(figure)
        beside.unlink(missing_ok=True)


def draw_by_time(comparison: Comparison, axes: Any) -> None:
    """Validation loss by processor seconds of training, a thin line for each seed."""
    for number, result in enumerate(comparison.results):
        color = "black" if result.name == comparison.baseline else f"C{number % 10}"
        for cell in comparison.cells(result.name).values():
            seconds, values = zip(*(cell.time_curve or ((0.0, math.nan),)), strict=True)
            axes.plot(seconds, values, color=color, linewidth=1.0, linestyle="-" if number < 10 else "--")
    axes.set_title("validation loss by processor time, every seed", fontsize=11)
    axes.set_xlabel("processor seconds of training")
    axes.grid(alpha=0.3)
    zoom(axes)


def zoom(axes: Any) -> None:
    """Cut off the steep beginning, where all arms look alike: the first quarter of training does not set the limits."""
    drawn = [(tokens, loss) for line in axes.get_lines() for tokens, loss in zip(*line.get_data(), strict=True)]
    points = [point for point in drawn if math.isfinite(point[1])]
    end = max(tokens for tokens, _ in points)
    late = [loss for tokens, loss in points if tokens >= end / 4]
    margin = 0.05 * (max(late) - min(late)) or 0.05
    axes.set_ylim(min(late) - margin, max(late) + margin)


def loss_curve(comparison: Comparison, arm: str) -> Curve:
    """The validation loss of an arm by tokens, at the points where all its seeds were validated."""
    curves = [dict(cell.curve) for cell in comparison.cells(arm).values()]
    shared = sorted(set.intersection(*(set(curve) for curve in curves)))
    return [(tokens, estimate([curve[tokens] for curve in curves])) for tokens in shared]


def difference_curve(comparison: Comparison, arm: str) -> Curve:
    """The paired difference between an arm and the baseline, by tokens."""
    ours, theirs = comparison.cells(arm), comparison.cells(comparison.baseline)
    pairs = [(dict(ours[seed].curve), dict(theirs[seed].curve)) for seed in ours if seed in theirs]
    if not pairs:
        return []
    shared = sorted(set.intersection(*(set(a) & set(b) for a, b in pairs)))
    return [
        (tokens, paired_difference([a[tokens] for a, _ in pairs], [b[tokens] for _, b in pairs])) for tokens in shared
    ]
