"""The picture of focused models: what the loss and the facts found cost for each share of heads that is kept."""

from __future__ import annotations

from pathlib import Path

from varifocal.report.focus import compared_losses, facts_of, rise
from varifocal.results.focus import FocusMeasure


def plot_focus(result: FocusMeasure, path: Path) -> None:
    """Draw the rise of the loss and the facts found against the share of heads kept; the suffix sets the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    compared = compared_losses(result)
    sources = list(dict.fromkeys((row.texts, row.length) for row, _ in compared))
    known = [(row.name, row.keep) for row, _ in compared] + [(row.name, row.keep) for row in result.facts]
    names = list(dict.fromkeys(name for name, keep in known if 0 < keep < 1))
    panels = len(sources) + bool(result.facts)
    figure, every = pyplot.subplots(1, panels, figsize=(5 * panels, 4.2), layout="constrained", squeeze=False)
    losses = every[0][: len(sources)]
    for number, name in enumerate(names):
        style = {"color": f"C{number}", "marker": "os^Dvx"[number % 6], "markersize": 5, "label": name}
        for axes, source in zip(losses, sources, strict=True):
            rises = [
                (row.keep, rise(row, dense)) for row, dense in compared
                if (row.texts, row.length) == source and row.name in (name, "all windowed")
            ]  # fmt: skip
            rises.sort(key=lambda one: one[0])
            axes.errorbar(
                [keep for keep, _ in rises], [one.mean for _, one in rises],
                yerr=[one.half_width or 0 for _, one in rises], capsize=3, **style,
            )  # fmt: skip
        shares = sorted({row.keep for row in result.facts if row.name in (name, "all windowed")})
        found = [(keep, facts_of(result, name if keep else "all windowed", keep)) for keep in shares]
        if found:
            every[0][-1].plot([keep for keep, _ in found], [one.mean if one else None for _, one in found], **style)
    for axes, (texts, length) in zip(losses, sources, strict=True):
        axes.axhline(0.0, color="black", linewidth=0.8)
        axes.set_title(f"rise of the loss, {texts}, {length} tokens", fontsize=10)
    if result.facts:
        every[0][-1].set_title("facts found, of those that dense finds", fontsize=10)
        every[0][-1].set_ylim(-0.03, 1.03)
    for axes in every[0]:
        axes.set_xlabel("share of key heads that read everything")
        axes.grid(alpha=0.3)
    every[0][0].legend(fontsize=8)
    figure.suptitle(result.source, fontsize=11)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
