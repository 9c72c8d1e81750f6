"""The result of `varifocal analyze` as tables and sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from varifocal.report.table import Table, number, p_text
from varifocal.results.analysis import Analysis, HeadMeans, KindRow, PositionRow, Quantity

QUANTITY_NAMES = {
    "gate": "gate (weight of the near branch)",
    "width": "width of the window in keys",
    "distance": "mean distance of selected keys",
    "window_mass": "share of dense attention in the window",
}
KIND_LEGEND = (
    "Values are means over all heads. A difference compares tokens of the kind with other tokens at equal position and "
    "has a 95 % interval over documents; effect is the difference in standard deviations between tokens. Rare words, "
    "first and repeated mentions are compared with other content words, and far text with all predictions for which "
    "its worth is known."
)
SURE = 0.05
"""The claims below count only differences whose p-value, corrected for all comparisons, is lower than this."""


def quantity_name(name: str) -> str:
    """A quantity in words; a name that is not known here, from a newer version, stays as it is."""
    return QUANTITY_NAMES.get(name, name)


def selection_table(analysis: Analysis) -> Table:
    """Header and rows: for each head, the mass that a window and top-k recover, and whether it is local or global."""
    found = analysis.selection
    recovered = found.recovered()
    body = []
    for layer in range(analysis.layers):
        for head in range(analysis.heads):
            cells = [interval(means, layer, head) for means in recovered.values()]
            distance = number(found.distance.mean[layer][head], ".0f")
            body.append([f"{layer}.{head}", *cells, distance, found.reach[layer][head]])
    return [["layer.head", *recovered, "distance", "reach"], *body]


def interval(found: HeadMeans, layer: int, head: int) -> str:
    """45.1% ± 2.0."""
    mean, high = found.mean[layer][head], found.high[layer][head]
    if mean is None:
        return ""
    return f"{mean:.1%}" + ("" if high is None else f" ± {100 * (high - mean):.1f}")


def kind_table(rows: Sequence[KindRow]) -> Table:
    """Header and rows: each kind of token that occurs, its mean, and its difference from the others."""
    digits = digits_for([row.difference for row in rows])
    body = []
    for row in rows:
        if not row.tokens:
            continue
        body.append([
            row.kind,
            f"{row.tokens:,}",
            str(row.documents),
            number(row.mean, f".{digits}f"),
            number(row.difference, f"+.{digits}f") + reach(row.difference, row.high, digits),
            number(row.effect, "+.2f"),
            p_text(row.p_holm),
        ])  # fmt: skip
    return [["kind of token", "tokens", "documents", "mean", "difference", "effect", "p (Holm)"], *body]


def reach(middle: float | None, high: float | None, digits: int) -> str:
    """Half the width of an interval: ± 0.02."""
    return "" if middle is None or high is None else f" ± {high - middle:.{digits}f}"


def digits_for(values: Sequence[float | None]) -> int:
    """The decimals, 1 to 6, that show two digits of the largest value."""
    largest = max((abs(value) for value in values if value), default=1.0)
    return min(6, max(1, 2 - math.floor(math.log10(largest))))


def position_table(rows: Sequence[PositionRow]) -> Table:
    """Header and rows: the mean by how many tokens come before."""
    digits = digits_for([row.mean for row in rows])
    body = [
        [
            span(row.least, row.most),
            f"{row.tokens:,}",
            number(row.mean, f".{digits}f") + reach(row.mean, row.high, digits),
        ]
        for row in rows
    ]
    return [["tokens before", "tokens", "mean"], *body]


def all_tables(analysis: Analysis) -> Iterator[tuple[str, Table]]:
    """All tables with their titles, for the terminal."""
    yield "dense attention recovered, for queries beyond the window", selection_table(analysis)
    for name, quantity in analysis.quantities.items():
        yield f"{quantity_name(name)}, by kind of token", kind_table(quantity.by_kind)
        yield f"{quantity_name(name)}, by position", position_table(quantity.by_position)
    gain = analysis.context_gain.by_kind
    yield "worth of the text beyond the window in nats, by kind of predicted token", kind_table(gain)


def is_sure(row: KindRow) -> bool:
    """Whether a difference survives the correction."""
    return row.difference is not None and row.p_holm is not None and row.p_holm < SURE


def clear_heads(quantity: Quantity, kind: str) -> tuple[int, int]:
    """How many heads are clearly higher, and how many clearly lower, at tokens of a kind."""
    higher = lower = 0
    for row in quantity.by_kind_and_head:
        for differences, p_values in zip(row.difference, row.p_holm, strict=True):
            for difference, p in zip(differences, p_values, strict=True):
                if row.kind == kind and difference is not None and p is not None and p < SURE:
                    higher, lower = higher + (difference > 0), lower + (difference < 0)
    return higher, lower


def findings(analysis: Analysis) -> list[str]:
    """A sentence for each quantity; it claims only what survives the correction."""
    sentences = []
    for name, quantity in analysis.quantities.items():
        sure = sorted(filter(is_sure, quantity.by_kind), key=lambda row: -abs(row.effect or 0))
        if not sure:
            sentences.append(f"{quantity_name(name)}: no difference shown between kinds of token, averaged over heads.")
            continue
        told = [finding(row, clear_heads(quantity, row.kind), analysis.layers * analysis.heads) for row in sure[:4]]
        more = f"; {len(sure) - 4} more in the table" if len(sure) > 4 else ""
        sentences.append(f"{quantity_name(name)}: {'; '.join(told)}{more}.")
    return sentences


def finding(row: KindRow, clear: tuple[int, int], heads: int) -> str:
    """A difference that survives the correction, in words."""
    word = "higher" if (row.difference or 0) > 0 else "lower"
    return (
        f"{word} at {row.kind} ({difference_words(row)}, effect {row.effect or 0:+.2f}; {clear[0]} of {heads} heads "
        f"clearly higher, {clear[1]} lower)"
    )


def difference_words(row: KindRow) -> str:
    """+0.1, +0.05 to +0.15."""
    where = "" if row.low is None or row.high is None else f", {row.low:+.3g} to {row.high:+.3g}"
    return f"{row.difference or 0:+.3g}{where}"


def gain_sentence(analysis: Analysis) -> str:
    """What the text beyond the window is worth."""
    gain = analysis.context_gain
    if gain.mean is None:
        return "No prediction had text beyond the window."
    told = f"Text more than {analysis.window} tokens back is worth {gain.mean:+.4f} nats a token"
    if gain.low is None or gain.high is None:
        told += "; with one document the spread is not known"
    else:
        told += f" (95 % interval {gain.low:+.4f} to {gain.high:+.4f})"
        told += ": no difference shown" if gain.low <= 0 <= gain.high else ""
    return (
        f"{told}; it makes {gain.helps or 0:.1%} of {gain.tokens:,} predictions at least twice as probable and "
        f"{gain.harms or 0:.1%} at most half as probable."
    )


def capital(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def span(least: int, most: int) -> str:
    """4-7."""
    return str(least) if least == most else f"{least}-{most}"
