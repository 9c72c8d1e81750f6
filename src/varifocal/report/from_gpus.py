"""One line for whoever has a GPU to send back: what was run on it, where, and how it went."""

from __future__ import annotations

from collections.abc import Sequence

from varifocal.results.attention_bench import AttentionBench
from varifocal.results.conformance import ConformanceRecord


def check_line(results: Sequence[ConformanceRecord], *, where: str, backend: str, dtype: str) -> str:
    """The outcome of `varifocal check`; `where` names device and versions."""
    findings = [finding for result in results for finding in result.findings]
    kept = [finding for finding in findings if finding.verdict == "kept"]
    broken = [
        f"{one.name}: {finding.row}" for one in results for finding in one.findings if finding.verdict == "broken"
    ]
    worst = max((finding.error or 0.0 for finding in kept), default=0.0)
    told = f"{len(kept)} kept (worst error {worst:.0e}), {len(broken)} broken"
    return f"check on {where}, {backend}, {dtype}: {told}" + (f" ({', '.join(broken)})" if broken else "")


def bench_line(result: AttentionBench, *, where: str) -> str:
    """The outcome of `varifocal bench attention`: the speeds at the longest text of each pass, and what was refused."""
    passes = []
    for kind in result.passes():
        length = max(result.lengths(kind))
        rows = [row for name in result.names(kind) if (row := result.row(name, kind, length)) is not None]
        speeds = ", ".join(f"{row.name} {row.speedup:.2f}" for row in rows)
        passes.append(f"{kind} at {length}: {speeds}")
    refused = f"; not timed: {', '.join(result.faults)}" if result.faults else ""
    return f"bench attention on {where}, {result.workload.words}: {'; '.join(passes)}{refused}"
