"""The result of `varifocal bench model` as tables."""

from __future__ import annotations

from varifocal.report.table import Table
from varifocal.results.model_bench import ModelBench, ModelRow


def model_table(bench: ModelBench, kind: str) -> Table:
    """Header and rows: tokens a second and, for training, peak memory, with their ratios to the baseline."""
    rows = bench.of(kind)
    lengths = sorted({row.length for row in rows})
    with_memory = any(row.peak_bytes for row in rows)
    header = ["n ="]
    for length in lengths:
        header += [f"{length}: tokens/s", *(["memory"] if with_memory else [])]
    found = {(row.name, row.length): row for row in rows}
    body = []
    for name in dict.fromkeys(row.name for row in rows):
        cells = [name]
        for length in lengths:
            row = found.get((name, length))
            cells.append(f"{row.tokens_per_second:.3g} ({row.speedup:.2f}x)" if row else "")
            if with_memory:
                cells.append(memory_text(row))
        body.append(cells)
    return [header, *body]


def memory_text(row: ModelRow | None) -> str:
    """1.50 GB (0.75x)."""
    if row is None or row.peak_bytes is None or row.memory_ratio is None:
        return ""
    return f"{row.peak_bytes / 1e9:.2f} GB ({row.memory_ratio:.2f}x)"
