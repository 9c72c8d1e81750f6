"""The result file of `varifocal bench attention`, read for tables and plots."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from varifocal.results.result_file import read_result


@dataclass(frozen=True)
class AttentionBench:
    """A result file."""

    content: dict[str, Any]

    @property
    def baseline(self) -> str:
        return str(self.content["baseline"])

    def names(self, kind: str) -> list[str]:
        """Contenders with a row of that pass, in the order of the file."""
        return list(dict.fromkeys(row["name"] for row in self.content["rows"] if row["pass"] == kind))

    def passes(self) -> list[str]:
        return list(dict.fromkeys(row["pass"] for row in self.content["rows"]))

    def lengths(self, kind: str) -> list[int]:
        return sorted({row["length"] for row in self.content["rows"] if row["pass"] == kind})

    def row(self, name: str, kind: str, length: int) -> dict[str, Any] | None:
        """The row of a contender, pass and length, if it was measured."""
        for row in self.content["rows"]:
            if (row["name"], row["pass"], row["length"]) == (name, kind, length):
                return dict(row)
        return None

    def growth(self, name: str, kind: str, what: str, *, least: int = 4096) -> float | None:
        """The exponent of n in "seconds" or "peak_bytes" between the first length from `least` on and the last."""
        rows = [self.row(name, kind, length) for length in self.lengths(kind) if length >= least]
        found = [row for row in rows if row is not None and row[what]]
        if len(found) < 2:
            return None
        first, last = found[0], found[-1]
        return math.log(last[what] / first[what]) / math.log(last["length"] / first["length"])


def read_attention_bench(path: Path) -> AttentionBench:
    """ValueError unless the file is a result of `varifocal bench attention`."""
    return AttentionBench(read_result(path, key="benchmark", kind="attention", command="varifocal bench attention"))


def speedup_table(bench: AttentionBench, kind: str) -> list[list[str]]:
    """Header and rows: the speed of each contender relative to the baseline, by length, and its growth."""
    lengths = bench.lengths(kind)
    header = ["n =", *(str(length) for length in lengths), "growth"]
    body = []
    for name in bench.names(kind):
        cells = [f"{row['speedup']:.2f}x" if (row := bench.row(name, kind, n)) else "" for n in lengths]
        growth = bench.growth(name, kind, "seconds", least=min(4096, lengths[0] if len(lengths) < 2 else lengths[-2]))
        body.append([name, *cells, "" if growth is None else f"n^{growth:.2f}"])
    return [header, *body]


def memory_table(bench: AttentionBench, kind: str) -> list[list[str]]:
    """Header and rows: peak additional memory in MB, and relative to the baseline."""
    probed = [row for row in bench.content["rows"] if row["pass"] == kind and row["peak_bytes"] is not None]
    lengths = sorted({row["length"] for row in probed})
    body = []
    for name in bench.names(kind):
        taken = {row["length"]: row for row in probed if row["name"] == name}
        cells = [
            f"{row['peak_bytes'] / 1e6:.0f} ({row['memory_ratio']:.2f}x)" if (row := taken.get(n)) else ""
            for n in lengths
        ]
        growth = bench.growth(name, kind, "peak_bytes", least=lengths[-2] if len(lengths) > 1 else 0)
        body.append([name, *cells, "" if growth is None else f"n^{growth:.2f}"])
    return [["n =", *(str(length) for length in lengths), "growth"], *body]


def markdown(table: list[list[str]]) -> str:
    """A table as Markdown."""
    header, *body = table
    lines = [f"| {' | '.join(header)} |", "| --- |" + " ---: |" * (len(header) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in body)])
