"""Speed and memory against the length of the text, from a benchmark's file."""

from __future__ import annotations

from varifocal.report.page.drawing import INK, canvas, finished, legend, line_style, plain_numbers
from varifocal.report.page.figure import Cell, Figure
from varifocal.results.attention_bench import AttentionBench

PASSES = {"training": "forward and backward", "forward": "forward", "decode": "one token against a cache"}


def bench_figures(bench: AttentionBench, kind: str = "training") -> list[Figure]:
    """Speed relative to the baseline, and peak memory, both against n."""
    names = [name for name in bench.names(kind) if not name.startswith(("peer", "reference"))]
    figures = [bench_figure(bench, kind, names, speed=True)]
    if any(row.peak_bytes for row in bench.of(kind)):
        figures.append(bench_figure(bench, kind, names, speed=False))
    return figures


def bench_figure(bench: AttentionBench, kind: str, names: list[str], *, speed: bool) -> Figure:
    """One of the two, a line for each contender."""
    rows: list[list[Cell]] = []
    told = []
    with canvas(6.4, 4.4) as (figure, axes):
        for number, name in enumerate(names):
            points = [
                (row.length, row.speedup if speed else (row.peak_bytes or 0) / 1e6)
                for length in bench.lengths(kind)
                if (row := bench.row(name, kind, length)) and (speed or row.peak_bytes)
            ]
            if not points:
                continue
            style = line_style(number) | ({"color": INK} if name == bench.baseline else {})
            axes.plot([n for n, _ in points], [value for _, value in points], label=name, **style)
            rows += [[name, n, value] for n, value in points]
            told.append(f"{name} {points[-1][1]:.3g}{'x' if speed else ' MB'} at {points[-1][0]:,}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        plain_numbers(axes.xaxis)
        plain_numbers(axes.yaxis)
        axes.set_xlabel("tokens")
        axes.set_ylabel(f"speed, {bench.baseline} = 1" if speed else "peak additional memory, MB")
        legend(figure, axes)
        svg = finished(figure)
    return Figure(
        name=f"{'speed' if speed else 'memory'}_against_length",
        title=f"{'Speed' if speed else 'Memory'} against the length of the text, {PASSES.get(kind, kind)}",
        svg=svg,
        words="",
        numbers=f"On the longest text that each was measured on: {'; '.join(told)}.",
        header=("contender", "tokens", "speed" if speed else "peak_megabytes"),
        rows=rows,
        command=bench.environment.command,
    )
