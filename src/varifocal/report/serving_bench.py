"""The result of `varifocal bench serving` as tables."""

from __future__ import annotations

from varifocal.report.table import Table
from varifocal.results.serving_bench import ServingBench


def capacity_table(bench: ServingBench) -> Table:
    """Header and rows: what fits into the cache."""
    against = bench.capacities[0].name
    header = [
        f"texts of {bench.context:,} tokens", "key heads that read all", "MB a text",
        f"tokens in {bench.cache_bytes / 1e6:,.0f} MB", f"{against} = 1",
    ]  # fmt: skip
    body = [
        [
            row.name,
            f"{row.kept_heads:.0%}",
            f"{row.bytes_per_request / 1e6:,.1f}",
            f"{row.tokens:,}",
            f"{row.ratio:.2f}",
        ]
        for row in bench.capacities
    ]
    return [header, *body]


def speed_table(bench: ServingBench, setting: str) -> Table:
    """Header and rows of one setting: requests a second, times, memory."""
    found = bench.of(setting)
    header = [
        setting, "requests/s", f"{found[0].name} = 1", "ms a token", "first token s", "at once", "preempted",
        "cache MB", "peak MB",
    ]  # fmt: skip
    body = [
        [
            row.name,
            f"{row.requests_per_second:.3f}",
            f"{row.ratio:.2f}",
            f"{row.milliseconds_per_token:.0f}",
            f"{row.first_token_seconds:.1f}",
            f"{row.running}",
            f"{row.preemptions}",
            f"{row.cache_bytes / 1e6:,.0f}",
            f"{row.peak_bytes / 1e6:,.0f}",
        ]
        for row in found
    ]
    return [header, *body]


def settings_sentence(bench: ServingBench) -> str:
    """What was asked, and of whom."""
    return (
        f"{bench.requests} requests at once, each {bench.prompt:,} tokens to read and {bench.new_tokens:,} to write; "
        f"{bench.engine}, {bench.dtype}, blocks of {bench.block} tokens, at most {bench.chunk} tokens read at once. "
        "room: the cache holds all requests; limited: the same bytes for every model"
    )
