"""A comparison's page and picture, written into its folder."""

from __future__ import annotations

from pathlib import Path

from varifocal.report.comparison_plot import plot_comparison
from varifocal.report.comparison_tables import comparison_markdown
from varifocal.results.files import write_whole
from varifocal.statistics.comparison import Comparison

PAGE, PICTURE = "comparison.md", "curves.png"


def write_comparison_files(comparison: Comparison, folder: Path) -> None:
    """Write comparison.md and curves.png."""
    plot_comparison(comparison, folder / PICTURE)
    write_whole(folder / PAGE, comparison_markdown(comparison, plot=PICTURE))
