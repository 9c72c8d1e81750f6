"""The picture of a data set: how long its documents are, and where its tokens lie."""

from __future__ import annotations

from pathlib import Path

from varifocal.results.data_report import DataReport


def plot_data_report(report: DataReport, path: Path) -> None:
    """Draw shares of documents and of tokens by document length, with the window; the suffix sets the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharey=True)
    for panel, what in zip(panels, ("documents", "tokens"), strict=True):
        for place, (name, split) in enumerate(report.splits.items()):
            edges = [part.least for part in split.histogram] + [split.histogram[-1].most + 1]
            counts = [part.documents if what == "documents" else part.tokens for part in split.histogram]
            shares = [count / sum(counts) for count in counts]
            panel.stairs(shares, edges, label=name, color=f"C{place}", linewidth=1.8, fill=place == 0, alpha=0.7)
        panel.axvline(report.window, color="black", linewidth=1.0, linestyle="--", label=f"window {report.window}")
        panel.set_xscale("log", base=2)
        panel.set_xlabel("tokens in the document")
        panel.set_title(f"share of {what}", fontsize=11)
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=9)
    first = next(iter(report.splits.values()))
    figure.suptitle(
        f"{Path(report.source).name}, tokenizer {report.tokenizer.name}\n"
        f"{first.documents_longer_than_window:.0%} of documents are longer than the window, "
        f"{first.tokens_beyond_window:.0%} of tokens lie beyond it",
        fontsize=11,
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
