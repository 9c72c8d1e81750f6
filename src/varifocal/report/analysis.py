"""The file of `varifocal analyze`, read for tables and plots."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from varifocal.report.comparison_tables import Table, p_text
from varifocal.results.result_file import read_result

QUANTITY_NAMES = {
    "gate": "gate (weight of the near branch)",
    "width": "width of the window in keys",
    "distance": "mean distance of chosen keys",
    "window_mass": "share of dense attention in the window",
}
RECOVERED_NAMES = {
    "window": "window",
    "top_k": "top-k",
    "window_or_top_k": "either",
    "chosen": "chosen",
    "first": "first token",
}
KIND_LEGEND = (
    "Means over all heads, each difference with its 95 % interval over documents, against tokens that are not of the "
    "kind, at equal position; effect is the difference in standard deviations between tokens. Rare words, first and "
    "repeated mentions are compared with other content words, and far text with predictions whose worth of it is known."
)
SURE = 0.05
"""A difference is called one when its p-value, corrected for all that were asked, is below."""


@dataclass(frozen=True)
class Analysis:
    """The content of an analysis file."""

    content: dict[str, Any]
    path: Path

    @property
    def command(self) -> str:
        return str(self.content.get("environment", {}).get("command", ""))

    @property
    def window(self) -> int:
        return int(self.content["window"])

    @property
    def quantities(self) -> dict[str, Any]:
        found: dict[str, Any] = self.content["quantities"]
        return found

    def setting(self) -> str:
        """One line: what was read."""
        one = self.content
        return (
            f"{one['tokens']:,} tokens of {one['documents']} documents of the {one['split']} split of {one['data']}, "
            f"rows of {one['length']}, window {one['window']}; 95 % intervals from {one['resamples']} resamplings of "
            "documents"
        )


def read_analysis(path: Path) -> Analysis:
    """ValueError unless the file is one of `varifocal analyze`."""
    return Analysis(
        read_result(path, key="experiment", kind="analysis", command="varifocal analyze", option="-o"), path
    )


def selection_table(analysis: Analysis) -> Table:
    """Header and rows: for each head, the mass that a window and top-k recover, and whether it is local or global."""
    found = analysis.content["selection"]
    names = [name for name in RECOVERED_NAMES if name in found]
    body = []
    for layer in range(analysis.content["layers"]):
        for head in range(analysis.content["heads"]):
            cells = [interval(found[name], layer, head) for name in names]
            distance = number(found["distance"]["mean"][layer][head], ".0f")
            body.append([f"{layer}.{head}", *cells, distance, found["reach"][layer][head]])
    return [["layer.head", *(RECOVERED_NAMES[name] for name in names), "distance", "reach"], *body]


def interval(found: dict[str, Any], layer: int, head: int) -> str:
    """45.1% ± 2.0."""
    mean, high = found["mean"][layer][head], found["high"][layer][head]
    if mean is None:
        return ""
    return f"{mean:.1%}" + ("" if high is None else f" ± {100 * (high - mean):.1f}")


def kind_table(rows: list[dict[str, Any]]) -> Table:
    """Header and rows: each kind of token that occurs, its mean, and its difference to the others."""
    digits = digits_for([row["difference"] for row in rows])
    body = []
    for row in rows:
        if not row["tokens"]:
            continue
        spread = "" if row["high"] is None else f" ± {row['high'] - row['difference']:.{digits}f}"
        body.append([
            row["kind"],
            f"{row['tokens']:,}",
            str(row["documents"]),
            number(row["mean"], f".{digits}f"),
            number(row["difference"], f"+.{digits}f") + spread,
            number(row["effect"], "+.2f"),
            p_text(row["p_holm"]),
        ])  # fmt: skip
    return [["kind of token", "tokens", "documents", "mean", "difference", "effect", "p (Holm)"], *body]


def digits_for(values: Sequence[float | None]) -> int:
    """Decimals that show two digits of the largest of the values; from 1 to 6."""
    largest = max((abs(value) for value in values if value), default=1.0)
    return min(6, max(1, 2 - math.floor(math.log10(largest))))


def position_table(rows: list[dict[str, Any]]) -> Table:
    """Header and rows: the mean by how many tokens stand before."""
    digits = digits_for([row["mean"] for row in rows])
    body = []
    for row in rows:
        spread = "" if row["high"] is None else f" ± {row['high'] - row['mean']:.{digits}f}"
        body.append(
            [span(row["least"], row["most"]), f"{row['tokens']:,}", number(row["mean"], f".{digits}f") + spread]
        )
    return [["tokens before", "tokens", "mean"], *body]


def all_tables(analysis: Analysis) -> Iterator[tuple[str, Table]]:
    """Title and table of everything, for the terminal."""
    yield "dense attention recovered, queries beyond the window", selection_table(analysis)
    for name, quantity in analysis.quantities.items():
        yield f"{QUANTITY_NAMES[name]}, by kind of token", kind_table(quantity["by_kind"])
        yield f"{QUANTITY_NAMES[name]}, by position", position_table(quantity["by_position"])
    gain = analysis.content["context_gain"]["by_kind"]
    yield "worth of the text beyond the window in nats, by kind of predicted token", kind_table(gain)


def clear_heads(quantity: dict[str, Any], kind: str) -> tuple[int, int]:
    """How many heads are clearly higher, and how many clearly lower, at tokens of a kind."""
    row = next(row for row in quantity["by_kind_and_head"] if row["kind"] == kind)
    higher = lower = 0
    for differences, p_values in zip(row["difference"], row["p_holm"], strict=True):
        for difference, p in zip(differences, p_values, strict=True):
            if p is not None and p < SURE:
                higher, lower = higher + (difference > 0), lower + (difference < 0)
    return higher, lower


def findings(analysis: Analysis) -> list[str]:
    """A sentence for each quantity that claims what survives the correction, and nothing else."""
    sentences = []
    heads = analysis.content["layers"] * analysis.content["heads"]
    for name, quantity in analysis.quantities.items():
        sure = [row for row in quantity["by_kind"] if row["p_holm"] is not None and row["p_holm"] < SURE]
        sure.sort(key=lambda row: -abs(row["effect"] or 0))
        if not sure:
            sentences.append(
                f"{QUANTITY_NAMES[name]}: no difference shown between kinds of token in the mean over heads."
            )
            continue
        told = []
        for row in sure[:4]:
            higher, lower = clear_heads(quantity, row["kind"])
            told.append(
                f"{'higher' if row['difference'] > 0 else 'lower'} at {row['kind']} ({row['difference']:+.3g}, "
                f"{row['low']:+.3g} to {row['high']:+.3g}, effect {row['effect'] or 0:+.2f}; {higher} of {heads} heads "
                f"clearly higher, {lower} lower)"
            )
        more = f"; {len(sure) - 4} more in the table" if len(sure) > 4 else ""
        sentences.append(f"{QUANTITY_NAMES[name]}: {'; '.join(told)}{more}.")
    return sentences


def gain_sentence(analysis: Analysis) -> str:
    """What the text beyond the window is worth."""
    gain = analysis.content["context_gain"]
    if gain["mean"] is None:
        return "No prediction had text beyond the window."
    where = "" if gain["low"] is None else f" (95 % interval {gain['low']:+.4f} to {gain['high']:+.4f})"
    told = f"Text more than {analysis.window} tokens back is worth {gain['mean']:+.4f} nats a token{where}"
    if gain["low"] is None:
        told += "; with one document nothing can be said of its spread"
    elif gain["low"] <= 0 <= gain["high"]:
        told += ": no difference shown"
    return (
        f"{told}; it makes {gain['helps']:.1%} of {gain['tokens']:,} predictions at least twice as probable and "
        f"{gain['harms']:.1%} at most half as probable."
    )


def capital(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def span(least: int, most: int) -> str:
    """4-7."""
    return str(least) if least == most else f"{least}-{most}"


def number(value: float | None, form: str) -> str:
    """The number, or nothing."""
    return "" if value is None else format(value, form)
