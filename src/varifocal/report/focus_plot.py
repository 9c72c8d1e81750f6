"""The picture of focused models: what the loss and the facts found cost for each share of heads that is kept."""

from __future__ import annotations

from pathlib import Path

from varifocal.results.focus import FocusMeasure, FocusRow


def plot_focus(result: FocusMeasure, path: Path) -> None:
    """Draw the rise of the loss and the facts found against the share of heads kept; the suffix sets the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (loss, facts) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    end = [row for row in result.rows if row.keep == 0]
    names = list(dict.fromkeys(row.name for row in result.rows if row.keep > 0))
    for number, name in enumerate(names):
        rows: list[FocusRow] = sorted((row for row in result.rows if row.name == name), key=lambda row: row.keep)
        rows = [*end, *rows]
        style = {"color": f"C{number}", "marker": "os^D"[number % 4], "markersize": 5, "label": name}
        loss.errorbar(
            [row.keep for row in rows], [row.loss.mean for row in rows],
            yerr=[row.loss.half_width or 0 for row in rows], capsize=3, **style,
        )  # fmt: skip
        found = [(row.keep, row.found.mean) for row in rows if row.found is not None]
        if found:
            facts.plot([keep for keep, _ in found], [share for _, share in found], **style)
    loss.axhline(0.0, color="black", linewidth=0.8)
    loss.set_title(f"rise of the loss over dense, nats a token, {result.length} tokens", fontsize=11)
    facts.set_title("facts found, of those that dense finds", fontsize=11)
    facts.set_ylim(-0.03, 1.03)
    for axes in (loss, facts):
        axes.set_xlabel("share of key heads that read everything")
        axes.grid(alpha=0.3)
    loss.legend(fontsize=8)
    figure.suptitle(f"{result.source} on {result.documents} texts of {result.texts}", fontsize=11)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
