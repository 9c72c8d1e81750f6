"""Validation loss while training, and how far each arm ends from the baseline."""

from __future__ import annotations

from typing import Any

from varifocal.report.comparison_plot import Curve, difference_curve, loss_curve, zoom
from varifocal.report.page.drawing import INK, SERIES, canvas, few_ticks, finished, legend, line_style
from varifocal.report.page.figure import Cell, Figure
from varifocal.report.page.sources import RunFiles
from varifocal.statistics.comparison import Comparison


def comparison_figures(comparison: Comparison) -> list[Figure]:
    """The figures of a comparison's losses."""
    command = comparison.command
    names = [result.name for result in comparison.results]
    curves = {name: loss_curve(comparison, name) for name in names}
    figures = []
    if any(curves.values()):
        figures.append(curves_figure(curves, comparison.baseline, command))
    others = {name: difference_curve(comparison, name) for name in names if name != comparison.baseline}
    if any(others.values()):
        figures.append(differences_figure(others, comparison.baseline, command))
    ends = [result for result in comparison.results if result.difference is not None]
    if ends:
        figures.append(end_figure(comparison, command))
    return figures


def curves_figure(curves: dict[str, Curve], baseline: str, command: str) -> Figure:
    """Means over seeds with their intervals as bands."""
    with canvas(6.4, 4.0) as (figure, axes):
        for name, style in styles(list(curves), baseline).items():
            draw(axes, curves[name], name, style)
        zoom(axes)
        axes.set_xlabel("million tokens of training")
        axes.set_ylabel("validation loss, nats a token")
        legend(figure, axes)
        svg = finished(figure)
    last = "; ".join(f"{name} {curve[-1][1].mean:.4f}" for name, curve in curves.items() if curve)
    banded = any(point.interval for curve in curves.values() for _, point in curve)
    return Figure(
        name="validation_loss",
        title="Validation loss while training" + (", mean over seeds; bands are 95 % intervals" if banded else ""),
        svg=svg,
        words="",
        numbers=f"At the last validation: {last}.",
        header=("arm", "tokens", "loss", "low", "high", "seeds"),
        rows=curve_rows(curves),
        command=command,
    )


def differences_figure(curves: dict[str, Curve], baseline: str, command: str) -> Figure:
    """Paired differences from the baseline while training."""
    with canvas(6.4, 4.0) as (figure, axes):
        for name, style in styles(list(curves), baseline).items():
            draw(axes, curves[name], name, style)
        axes.axhline(0, color=INK, linewidth=1.0)
        axes.set_xlabel("million tokens of training")
        axes.set_ylabel(f"loss minus that of {baseline}")
        legend(figure, axes)
        svg = finished(figure)
    last = "; ".join(f"{name} {curve[-1][1].mean:+.4f}" for name, curve in curves.items() if curve)
    return Figure(
        name="difference_while_training",
        title=f"Difference from {baseline} while training, paired by seed",
        svg=svg,
        words="Below 0 is better.",
        numbers=f"At the last validation: {last}.",
        header=("arm", "tokens", "difference", "low", "high", "seeds"),
        rows=curve_rows(curves),
        command=command,
    )


def end_figure(comparison: Comparison, command: str) -> Figure:
    """The difference at the end with its interval, one line for each arm."""
    rows: list[list[Cell]] = []
    told = []
    for result in comparison.results:
        if (found := result.difference) is None:
            continue
        low, high = found.interval or (None, None)
        rows.append([result.name, found.mean, low, high, found.p_value, result.adjusted_p, found.count])
        told.append(f"{result.name} {found.mean:+.4f}" + ("" if low is None else f" ({low:+.4f} to {high:+.4f})"))
    with canvas(6.4, 1.1 + 0.34 * len(rows)) as (figure, axes):
        for place, (_, mean, least, most, *_) in enumerate(rows):
            if least is not None:
                axes.plot([least, most], [place, place], color=SERIES[0], linewidth=2.4)
            axes.plot([mean], [place], color=SERIES[0], marker="o", markersize=7)
        axes.axvline(0, color=INK, linewidth=1.0)
        axes.set_yticks(range(len(rows)), [str(row[0]) for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        few_ticks(axes.xaxis)
        axes.set_xlabel(f"validation loss minus that of {comparison.baseline}, nats a token")
        svg = finished(figure)
    return Figure(
        name="difference_at_the_end",
        title=f"Difference from {comparison.baseline} at the end of training"
        + (", with its 95 % interval over seeds" if any(row[2] is not None for row in rows) else ""),
        svg=svg,
        words=f"Below 0 is better than {comparison.baseline}.",
        numbers=f"{'; '.join(told)}.",
        header=("arm", "difference", "low", "high", "p", "p_holm", "seeds"),
        rows=rows,
        command=command,
    )


def run_figure(run: RunFiles) -> Figure | None:
    """The validation loss of a single run; None before its second validation."""
    if len(run.curve) < 2:
        return None
    with canvas(6.4, 3.6) as (figure, axes):
        tokens, losses = [one / 1e6 for one, _ in run.curve], [loss for _, loss in run.curve]
        axes.plot(tokens, losses, **line_style(0))
        axes.set_xlabel("million tokens of training")
        axes.set_ylabel("validation loss, nats a token")
        svg = finished(figure)
    return Figure(
        name=f"{run.name}_validation_loss",
        title=f"Validation loss of {run.name}",
        svg=svg,
        words=f"From {losses[0]:.4f} to {losses[-1]:.4f} nats a token at {run.curve[-1][0]:,} tokens of training.",
        header=("tokens", "loss"),
        rows=[[one, loss] for one, loss in run.curve],
        command=run.command,
    )


def styles(names: list[str], baseline: str) -> dict[str, dict[str, Any]]:
    """How each arm is drawn, the same in every figure; the baseline has the colour of the text."""
    others = [name for name in names if name != baseline]
    numbered = {name: line_style(number) for number, name in enumerate(others)}
    return {name: numbered.get(name, line_style(0) | {"color": INK}) for name in names}


def draw(axes: Any, curve: Curve, name: str, style: dict[str, Any]) -> None:
    """Draw a line with its band."""
    tokens = [count / 1e6 for count, _ in curve]
    axes.plot(tokens, [point.mean for _, point in curve], label=name, **style)
    bounds = [point.interval for _, point in curve]
    if curve and all(bound is not None for bound in bounds):
        low, high = ([bound[side] for bound in bounds if bound is not None] for side in (0, 1))
        axes.fill_between(tokens, low, high, color=style["color"], alpha=0.14, linewidth=0)


def curve_rows(curves: dict[str, Curve]) -> list[list[Cell]]:
    """Every point with its interval."""
    return [
        [name, tokens, point.mean, *(point.interval or (None, None)), point.count]
        for name, curve in curves.items()
        for tokens, point in curve
    ]
