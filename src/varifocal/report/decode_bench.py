"""The result of `varifocal bench decode` as tables."""

from __future__ import annotations

from varifocal.report.table import Table
from varifocal.results.decode_bench import DecodeBench, LossOfWeights, SpeculationRow


def decode_table(bench: DecodeBench, context: int, texts: int) -> Table:
    """Header and rows of one context: speed, processor time, bytes, share of the bandwidth, first token."""
    found = [row for row in bench.of(texts) if row.context == context]
    against = found[0].against if found else ""
    header = [
        f"after {context:,} tokens" + (f" x {texts}" if texts > 1 else ""), "tokens/s", f"{against} = 1", "+-",
        "processor ms", "MB read", "of bandwidth", "first token s",
    ]  # fmt: skip
    body = [
        [
            row.name,
            f"{row.tokens_per_second:.1f}",
            f"{row.speedup:.2f}",
            f"{row.spread:.0%}",
            f"{row.processor_milliseconds:.1f}",
            "" if row.bytes_read is None else f"{row.bytes_read / 1e6:.0f}",
            "" if row.bandwidth_share is None else f"{row.bandwidth_share:.0%}",
            "" if row.first_token_seconds is None else f"{row.first_token_seconds:.2f}",
        ]
        for row in found
    ]
    return [header, *body]


def speed_table(bench: DecodeBench, texts: int = 1) -> Table:
    """Header and rows of all contexts: tokens a second, the ratio and the share of the bandwidth."""
    contexts = list(dict.fromkeys(row.context for row in bench.of(texts)))
    found = {(row.name, row.context): row for row in bench.of(texts)}
    body = []
    for name in dict.fromkeys(row.name for row in bench.of(texts)):
        cells = [name]
        for context in contexts:
            row = found.get((name, context))
            share = "" if row is None or row.bandwidth_share is None else f", {row.bandwidth_share:.0%}"
            cells.append("" if row is None else f"{row.tokens_per_second:.1f} ({row.speedup:.2f}x{share})")
        body.append(cells)
    return [["tokens/s after", *(f"{context:,}" for context in contexts)], *body]


def loss_sentence(one: LossOfWeights) -> str:
    """What holding the weights otherwise costs, with its interval."""
    half = one.difference.half_width or 0.0
    return (
        f"{one.weights} weights: loss {one.loss.mean + one.difference.mean:.4f} in place of {one.loss.mean:.4f} nats, "
        f"{one.difference.mean:+.5f} with a 95 % interval of +-{half:.5f} over {one.loss.count} documents "
        f"({one.tokens:,} tokens of {one.text})"
    )


def speculation_sentence(row: SpeculationRow) -> str:
    """What speculative generation gained."""
    same = "the same text" if row.same_text else "another text"
    return (
        f"{row.name}, {row.kind} after a {row.prompt} text of {row.context:,} tokens: {row.tokens} tokens in "
        f"{row.calls} calls, {row.speedup:.2f} times as fast, {same}"
    )
