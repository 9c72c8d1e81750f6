"""The result file of `varifocal bench data`, read for tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from varifocal.results.result_file import read_result


def read_data_bench(path: Path) -> dict[str, Any]:
    """ValueError unless the file is a result of `varifocal bench data`."""
    return read_result(path, key="benchmark", kind="data", command="varifocal bench data")


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
