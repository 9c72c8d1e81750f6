"""The result file of `varifocal bench data`, read for tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_data_bench(path: Path) -> dict[str, Any]:
    """ValueError unless the file is a result of `varifocal bench data`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read {path} as a benchmark result: {error}") from error
    if not isinstance(content, dict) or content.get("benchmark") != "data":
        raise ValueError(f"{path} is not a result of 'varifocal bench data'; make one with its --json option")
    return content


def reading_table(content: dict[str, Any]) -> list[list[str]]:
    """Header and rows: millions of tokens a second for each length of a row, and the ratio to the limit."""
    lengths = sorted({row["length"] for row in content["rows"]})
    found = {(row["name"], row["length"]): row for row in content["rows"]}
    names = list(dict.fromkeys(row["name"] for row in content["rows"]))
    body = [
        [
            name,
            *(
                f"{found[name, length]['tokens_per_second'] / 1e6:.0f} ({found[name, length]['ratio']:.2f}x)"
                for length in lengths
            ),
        ]
        for name in names
    ]
    return [["", *(f"rows of {length}" for length in lengths)], *body]
