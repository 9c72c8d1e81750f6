"""The picture of a decoding benchmark: tokens a second, and the share of the memory's bandwidth, by context."""

from __future__ import annotations

from pathlib import Path

from varifocal.results.decode_bench import DecodeBench


def plot_decode_bench(bench: DecodeBench, path: Path) -> None:
    """Draw both against the context, for as many texts at once as come first; the suffix sets the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    texts = bench.rows[0].texts
    figure, (speed, share) = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for number, name in enumerate(dict.fromkeys(row.name for row in bench.of(texts))):
        rows = sorted((row for row in bench.of(texts) if row.name == name), key=lambda row: row.context)
        ours = not name.startswith(("transformers", "llama"))
        style = {
            "color": f"C{number % 10}" if ours else "black",
            "linestyle": "-" if ours else (":" if "llama" in name else "--"),
            "marker": "os^Dv<>PX*"[number % 10],
            "markersize": 5,
        }
        speed.plot([row.context for row in rows], [row.tokens_per_second for row in rows], label=name, **style)
        known = [(row.context, row.bandwidth_share) for row in rows if row.bandwidth_share is not None]
        share.plot([context for context, _ in known], [one for _, one in known], label=name, **style)
    for axes, title in ((speed, "tokens a second"), (share, "share of the memory's bandwidth")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens before")
        axes.set_ylim(bottom=0)
        axes.set_title(title, fontsize=11)
        axes.grid(alpha=0.3, which="both")
    speed.legend(fontsize=7.5)
    shared = bench.environment
    figure.suptitle(
        f"decoding {bench.source}, {shared.threads} threads, memory {bench.memory_gigabytes_per_second:.1f} GB/s",
        fontsize=11,
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
