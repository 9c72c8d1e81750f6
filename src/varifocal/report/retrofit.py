"""The result file of `varifocal retrofit --json` as a table."""

from __future__ import annotations

from typing import Any

from varifocal.report.table import Table, number
from varifocal.results.retrofit import RetrofitResult


def retrofit_table(result: RetrofitResult) -> Table:
    """Header and rows: the loss of each mechanism before and after adaptation, and how far it is from the source."""
    body = []
    for run in result.runs:
        asked = ", ".join(f"{name}={value}" for name, value in flat(run.asked))
        known = run.loss_before is not None and run.source_loss is not None
        body.append([
            f"{run.mechanism} {asked}".strip(),
            "none" if run.share is None else "dense" if run.share == 0 else f"dense but {run.share:.0e}",
            number(run.largest_logit_difference, ".1e"),
            number(run.loss_before, ".4f"),
            f"{(run.loss_before or 0) - (run.source_loss or 0):+.4f}" if known else "",
            number(run.loss_after, ".4f"),
        ])  # fmt: skip
    return [["", "promised start", "largest logit difference", "loss before", "against source", "loss after"], *body]


def flat(options: dict[str, Any], outer: str = "") -> list[tuple[str, Any]]:
    """Nested options as they are given on the command line."""
    found = []
    for name, value in options.items():
        found += flat(value, f"{outer}{name}.") if isinstance(value, dict) else [(f"{outer}{name}", value)]
    return found
