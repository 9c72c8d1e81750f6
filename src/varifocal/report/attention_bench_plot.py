"""The picture of an attention benchmark: speed and memory against the length of the text."""

from __future__ import annotations

from pathlib import Path

from varifocal.results.attention_bench import AttentionBench


def plot_attention_bench(bench: AttentionBench, path: Path, *, kind: str = "training") -> None:
    """Draw speed relative to the baseline and peak memory against n on logarithmic axes; the suffix sets the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (speed, memory) = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for number, name in enumerate(bench.names(kind)):
        rows = [row for length in bench.lengths(kind) if (row := bench.row(name, kind, length))]
        lengths = [row.length for row in rows]
        ours = not name.startswith(("torch", "peer", "reference"))
        style = {
            "color": "black" if name == bench.baseline else f"C{number % 10}",
            "linestyle": "-" if ours else "--",
            "marker": "os^Dv<>PX*"[number % 10],
            "markersize": 5,
            "linewidth": 1.8 if ours else 1.1,
        }
        speed.plot(lengths, [row.speedup for row in rows], label=name, **style)
        taken = [(row.length, row.peak_bytes / 1e6) for row in rows if row.peak_bytes]
        if taken:
            memory.plot([n for n, _ in taken], [size for _, size in taken], label=name, **style)
    for axes, title in ((speed, f"speed, {bench.baseline} = 1"), (memory, "peak additional memory, MB")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens")
        axes.set_title(title, fontsize=11)
        axes.grid(alpha=0.3, which="both")
    speed.axhline(1.0, color="black", linewidth=0.8)
    speed.legend(fontsize=7.5, loc="upper left")
    what = {"training": "forward + backward", "forward": "forward", "decode": "one token"}[kind]
    figure.suptitle(f"{what}, {bench.workload.words}, {bench.environment.threads} threads", fontsize=11)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
