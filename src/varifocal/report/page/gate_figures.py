"""What gates, widths and selections do while a model trains, from the traces of its runs."""

from __future__ import annotations

import warnings
from typing import Any

import numpy
from numpy.typing import NDArray

from varifocal.report.page.drawing import canvas, finished, heat_map, legend, line_style, plain_numbers
from varifocal.report.page.figure import Cell, Figure
from varifocal.report.page.sources import RunFiles

OVER_TRAINING = {
    "gate_mean": ("Gates over training", "gate, weight of the near branch"),
    "gate_saturated": ("Saturated gates over training", "share below 0.05 or above 0.95"),
    "gate_gradient": ("Gradient of the gates over training", "norm of the gradient"),
    "width_mean": ("Width of the windows over training", "keys"),
    "distance_mean": ("Distance of selected keys over training", "tokens"),
}
"""Title and axis of each trace that is shown by layer."""
FLAT = 0.01
"""The range of a trace, against its largest value, below which a figure would show a straight line."""


def gate_figures(arm: str, runs: list[RunFiles], command: str | None = None) -> tuple[list[Figure], list[str]]:
    """The figures of an arm's traces, averaged over its seeds, and sentences in place of those that would be flat.

    Args:
        arm: its name.
        runs: of all seeds.
        command: what made the traces; by default what made the runs.
    """
    traces = mean_traces([run.traces for run in runs if run.traces])
    if not traces:
        return [], []
    command = command or next(run.command for run in runs if run.traces)
    seeds = sum(bool(run.traces) for run in runs)
    figures, sentences = [], []
    if "gate_mean" in traces:
        if not numpy.isfinite(traces["gate_mean"][-1]).any():
            return [], ["The gates decide nothing here: near and far branch read the same keys in all texts."]
        figures.append(map_figure(arm, traces, seeds, command))
    for name in OVER_TRAINING:
        if name not in traces or not numpy.isfinite(traces[name]).any():
            continue
        if (sentence := flat_sentence(name, traces)) is not None:
            sentences.append(sentence)
        else:
            figures.append(training_figure(arm, name, traces, seeds, command))
    return figures, sentences


def flat_sentence(name: str, traces: dict[str, NDArray[numpy.float64]]) -> str | None:
    """What a trace is that hardly moves, or was recorded once; None for one that is worth a figure."""
    values = traces[name]
    least, most = float(numpy.nanmin(values)), float(numpy.nanmax(values))
    title, axis = OVER_TRAINING[name]
    if most - least <= FLAT * max(abs(least), abs(most)):
        return f"{title}: {axis} is {most:.3g} in every layer and head, at every step."
    if len(traces["step"]) == 1:
        return f"{title}: {axis} is between {least:.3g} and {most:.3g} at step {int(traces['step'][0])}, the only one."
    return None


def mean_traces(every: list[dict[str, NDArray[Any]]]) -> dict[str, NDArray[numpy.float64]]:
    """The mean over runs of the traces that all of them have, at the steps that all of them have."""
    if not every:
        return {}
    steps = sorted(set.intersection(*(set(traces["step"].tolist()) for traces in every)))
    found: dict[str, NDArray[numpy.float64]] = {"step": numpy.array(steps, dtype=numpy.float64)}
    if not steps:
        return {}
    for name in set.intersection(*(set(traces) for traces in every)) - {"step"}:
        parts = [traces[name][[traces["step"].tolist().index(step) for step in steps]] for traces in every]
        if len({part.shape for part in parts}) == 1:
            found[name] = numpy.mean([part.astype(numpy.float64) for part in parts], axis=0)
    return found


def map_figure(arm: str, traces: dict[str, NDArray[numpy.float64]], seeds: int, command: str) -> Figure:
    """A map of the gate of each layer and head at the end of training."""
    gates = traces["gate_mean"][-1]
    layers, heads = gates.shape
    with canvas(1.6 + 0.55 * heads, 1.2 + 0.42 * layers) as (figure, axes):
        heat_map(figure, axes, gates.tolist(), least=0.0, most=1.0, form=".2f")
        svg = finished(figure)
    nearest, furthest = (
        numpy.unravel_index(place, gates.shape) for place in (numpy.nanargmax(gates), numpy.nanargmin(gates))
    )
    return Figure(
        name=f"{arm}_gate_map",
        title=f"Gate of each layer and head of {arm} after {int(traces['step'][-1])} steps, mean over {plural(seeds)}",
        svg=svg,
        words=(
            "A gate of 1 reads only the near branch, a gate of 0 only the far one. Mean over all heads "
            f"{numpy.nanmean(gates):.3f}; highest {gates[nearest]:.3f} in layer {nearest[0]} head {nearest[1]}, lowest "
            f"{gates[furthest]:.3f} in layer {furthest[0]} head {furthest[1]}."
        ),
        header=("layer", "head", "gate", "deviation", "saturated"),
        rows=[
            [layer, head, *(cell(traces[name][-1, layer, head]) if name in traces else None
                            for name in ("gate_mean", "gate_deviation", "gate_saturated"))]
            for layer in range(layers) for head in range(heads)
        ],
        command=command,
    )  # fmt: skip


def training_figure(arm: str, name: str, traces: dict[str, NDArray[numpy.float64]], seeds: int, command: str) -> Figure:
    """One trace by layer, averaged over heads, against the step."""
    title, axis = OVER_TRAINING[name]
    steps = traces["step"]
    with warnings.catch_warnings():
        # A layer without gates, or without widths, is NaN throughout, and its mean would warn.
        warnings.simplefilter("ignore", RuntimeWarning)
        by_layer = numpy.nanmean(traces[name], axis=2)
    shown = [layer for layer in range(by_layer.shape[1]) if numpy.isfinite(by_layer[:, layer]).any()]
    with canvas(5.0, 3.4) as (figure, axes):
        for layer in shown:
            axes.plot(steps, by_layer[:, layer], label=f"layer {layer}", **line_style(layer))
        if name == "gate_gradient" and numpy.nanmin(by_layer[:, shown]) > 0:
            axes.set_yscale("log")
            plain_numbers(axes.yaxis)
        if name == "gate_mean":
            axes.set_ylim(0, 1)
        if name == "gate_saturated":
            axes.set_ylim(-0.02, 1.02)
        axes.set_xlabel("step")
        axes.set_ylabel(axis)
        legend(figure, axes, columns=4)
        svg = finished(figure)
    told = "; ".join(f"layer {layer} from {by_layer[0, layer]:.3g} to {by_layer[-1, layer]:.3g}" for layer in shown)
    return Figure(
        name=f"{arm}_{name}",
        title=f"{title}, {arm}, by layer; mean over heads and {plural(seeds)}",
        svg=svg,
        words=f"{axis}: {told} (step {int(steps[0])} to {int(steps[-1])}).",
        header=("step", "layer", name),
        rows=[
            [int(step), layer, cell(by_layer[number, layer])] for number, step in enumerate(steps) for layer in shown
        ],
        command=command,
    )


def cell(value: float) -> Cell:
    """The number with six digits; None if it is not finite."""
    return float(f"{value:.6g}") if numpy.isfinite(value) else None


def plural(seeds: int) -> str:
    """1 seed, 2 seeds."""
    return f"{seeds} seed{'' if seeds == 1 else 's'}"
