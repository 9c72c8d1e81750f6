"""The report on a data set as tables: the lengths of its documents, and what lies beyond the window."""

from __future__ import annotations

from varifocal.report.table import Table
from varifocal.results.data_report import DataReport

BAR = 40
"""Characters of the longest bar."""


def length_table(report: DataReport) -> Table:
    """Header and rows: the lengths of each split's documents."""
    window = report.window
    header = ["split", "mean length", "median", "longest", f"documents over {window}", f"tokens beyond {window}"]
    return [header] + [
        [
            name,
            f"{split.mean_length:,.0f}",
            f"{split.quantiles['0.5']:,}",
            f"{split.longest:,}",
            f"{split.documents_longer_than_window:.1%}",
            f"{split.tokens_beyond_window:.1%}",
        ]
        for name, split in report.splits.items()
    ]


def histogram(report: DataReport) -> tuple[str, Table]:
    """The first split's name, and how many of its documents fall into each range of lengths, with bars."""
    name, split = next(iter(report.splits.items()))
    most = max(part.documents for part in split.histogram)
    return name, [["tokens", "documents", ""]] + [
        [f"{part.least:,}-{part.most:,}", f"{part.documents:,}", "█" * -(-BAR * part.documents // most)]
        for part in split.histogram
    ]
