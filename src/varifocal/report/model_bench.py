"""The result file of `varifocal bench model`, read for tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from varifocal.results.result_file import read_result


def read_model_bench(path: Path) -> dict[str, Any]:
    """ValueError unless the file is a result of `varifocal bench model`."""
    return read_result(path, key="benchmark", kind="model", command="varifocal bench model")


def model_table(content: dict[str, Any], kind: str) -> list[list[str]]:
    """Header and rows: tokens a second and, for training, peak memory, with their ratios to the baseline."""
    rows = [row for row in content["rows"] if row["pass"] == kind]
    lengths = sorted({row["length"] for row in rows})
    with_memory = any(row["peak_bytes"] for row in rows)
    header = ["n ="]
    for length in lengths:
        header += [f"{length}: tokens/s", *(["memory"] if with_memory else [])]
    body = []
    for name in dict.fromkeys(row["name"] for row in rows):
        cells = [name]
        for length in lengths:
            row = next((row for row in rows if (row["name"], row["length"]) == (name, length)), None)
            cells.append(f"{row['tokens_per_second']:.3g} ({row['speedup']:.2f}x)" if row else "")
            if with_memory:
                measured = row is not None and row["peak_bytes"] is not None
                cells.append(
                    f"{row['peak_bytes'] / 1e9:.2f} GB ({row['memory_ratio']:.2f}x)" if row and measured else ""
                )
        body.append(cells)
    return [header, *body]
