"""What maps of heads cost, as a table."""

from __future__ import annotations

from varifocal.results.focus import FocusMeasure


def focus_table(result: FocusMeasure) -> list[list[str]]:
    """A row for each map, with 95 % intervals over documents."""
    rows = [["heads by", "keep", "loss", "second half", "facts found", "cache at 8192"]]
    for row in result.rows:
        losses = [f"{one.mean:+.4f} ± {one.half_width or 0:.4f}" for one in (row.loss, row.far_loss)]
        found = "" if row.found is None else f"{row.found.mean:.0%} of {row.found.count}"
        rows.append([row.name, f"{row.keep:.2f}", *losses, found, f"{row.cache.get('8192', 1.0):.2f}"])
    return rows
