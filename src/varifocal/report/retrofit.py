"""The result file of `varifocal retrofit --json` as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from varifocal.results.result_file import read_result


def read_retrofit(path: Path) -> list[dict[str, Any]]:
    """The runs of a result file, or a ValueError that says why it is none."""
    content = read_result(path, key="experiment", kind="retrofit", command="varifocal retrofit")
    runs: list[dict[str, Any]] = content["runs"]
    return runs


def retrofit_table(runs: list[dict[str, Any]]) -> list[list[str]]:
    """Header and rows: the loss of each mechanism before and after its adaptation, and its distance from the source."""
    body = []
    for run in runs:
        asked = ", ".join(f"{name}={value}" for name, value in flat(run["asked"]))
        share = run["share"]
        body.append([
            f"{run['mechanism']} {asked}".strip(),
            "none" if share is None else "dense" if share == 0 else f"dense but {share:.0e}",
            f"{run['largest_logit_difference']:.1e}",
            f"{run['loss_before']:.4f}",
            f"{run['loss_before'] - run['source_loss']:+.4f}",
            f"{run['loss_after']:.4f}" if "loss_after" in run else "",
        ])  # fmt: skip
    return [["", "promised start", "largest logit difference", "loss before", "against source", "loss after"], *body]


def flat(options: dict[str, Any], outer: str = "") -> list[tuple[str, Any]]:
    """Nested options as they are given on the command line."""
    found = []
    for name, value in options.items():
        found += flat(value, f"{outer}{name}.") if isinstance(value, dict) else [(f"{outer}{name}", value)]
    return found
