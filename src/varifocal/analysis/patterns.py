"""Statistics of what was observed: by kind of token, by position, and by what the text beyond the window is worth."""

from __future__ import annotations

import math
from typing import Any

import numpy
from numpy.typing import NDArray

from varifocal.analysis.contrasts import (
    Contrast,
    Interval,
    Resampling,
    adjusted,
    contrast,
    deviations,
    mean_with_interval,
)
from varifocal.analysis.token_kinds import KINDS, Kind
from varifocal.analysis.token_table import TokenTable, bin_edges, position_bins

CLEAR = math.log(2)
"""Text beyond the window helps a prediction if it makes it at least twice as probable."""
FAR_KINDS = (
    Kind(
        "far text helps", "a prediction that the text beyond the window makes at least twice as probable", "known gain"
    ),
    Kind("far text harms", "one that it makes at most half as probable", "known gain"),
)
Mask = NDArray[numpy.bool_]


def kinds_with_gains(kinds: Mask, gains: NDArray[numpy.float32]) -> Mask:
    """The kinds [N, K] followed by those of FAR_KINDS."""
    with numpy.errstate(invalid="ignore"):
        return numpy.column_stack([kinds, gains >= CLEAR, gains <= -CLEAR])


def groups(kinds: Mask, known: Mask) -> list[tuple[Kind, Mask, Mask]]:
    """Each kind with its tokens [N] and the tokens [N] that it is compared with."""
    names = {kind.name: place for place, kind in enumerate(KINDS)}
    found = []
    for place, kind in enumerate((*KINDS, *FAR_KINDS)[: kinds.shape[1]]):
        base = numpy.ones(len(kinds), dtype=bool)
        if kind.among is not None:
            base = known if kind in FAR_KINDS else kinds[:, names[kind.among]]
        found.append((kind, kinds[:, place] & base, ~kinds[:, place] & base))
    return found


def pattern(table: TokenTable, known: Mask, resampling: Resampling, *, heads: tuple[int, int]) -> dict[str, Any]:
    """One quantity as plain arrays: its means, by kind and by position.

    Args:
        table: values [N, L H] of the quantity.
        known: bool [N], where it is known what the text beyond the window is worth.
        resampling: a resampling of the table's documents.
        heads: L and H.
    """
    everything = numpy.ones(len(table.documents), dtype=bool)
    means = mean_with_interval(table, everything, resampling)
    whole = whole_model(table)
    found = groups(table.kinds, known)
    overall = [contrast(whole, inside, outside, resampling) for _, inside, outside in found]
    by_head = [contrast(table, inside, outside, resampling) for _, inside, outside in found]
    overall_p = adjusted(numpy.array([one.p_value[0] for one in overall]))
    head_p = adjusted(numpy.stack([one.p_value for one in by_head]))
    return {
        "mean": means.mean.reshape(heads),
        "low": means.low.reshape(heads),
        "high": means.high.reshape(heads),
        "deviation": deviations(table.values).reshape(heads),
        "by_kind": [
            kind_row(kind, one, p) for (kind, _, _), one, p in zip(found, overall, overall_p.tolist(), strict=True)
        ],
        "by_kind_and_head": [
            {
                "kind": kind.name,
                "difference": one.difference.reshape(heads),
                "effect": one.effect.reshape(heads),
                "p": one.p_value.reshape(heads),
                "p_holm": p.reshape(heads),
            }
            for (kind, _, _), one, p in zip(found, by_head, head_p, strict=True)
        ],
        "by_position": by_position(table, resampling, heads=heads),
    }


def kind_row(kind: Kind, found: Contrast, adjusted_p: float) -> dict[str, Any]:
    """The row of a kind, averaged over all heads."""
    return {
        "kind": kind.name,
        "against": "other tokens" if kind.among is None else f"other tokens of {kind.among}",
        "tokens": found.tokens,
        "documents": found.documents,
        "mean": found.mean[0],
        "difference": found.difference[0],
        "low": found.low[0],
        "high": found.high[0],
        "effect": found.effect[0],
        "p": found.p_value[0],
        "p_holm": adjusted_p,
    }


def whole_model(table: TokenTable) -> TokenTable:
    """A table with one value for each token: the mean over all layers and heads."""
    known = numpy.isfinite(table.values)
    counts = known.sum(axis=1)
    totals = numpy.where(known, table.values, 0).sum(axis=1)
    with numpy.errstate(invalid="ignore"):
        mean = numpy.where(counts > 0, totals / counts, numpy.nan)
    return TokenTable(table.documents, table.positions, table.kinds, mean.astype(numpy.float32)[:, None])


def by_position(table: TokenTable, resampling: Resampling, *, heads: tuple[int, int]) -> list[dict[str, Any]]:
    """The mean over all heads by position, with its interval, and the mean of each layer."""
    bins, whole = position_bins(table.positions), whole_model(table)
    rows = []
    for place in numpy.unique(bins).tolist():
        included = bins == place
        if not numpy.isfinite(whole.values[included]).any():
            continue
        here: Interval = mean_with_interval(whole, included, resampling)
        layers = numpy.array([numpy.nanmean(part) if numpy.isfinite(part).any() else numpy.nan
                              for part in numpy.split(table.values[included], heads[0], axis=1)])  # fmt: skip
        least, most = bin_edges(place)
        rows.append(
            {
                "least": least,
                "most": min(most, int(table.positions.max())),
                "tokens": int(numpy.isfinite(whole.values[included]).sum()),
                "mean": here.mean[0],
                "low": here.low[0],
                "high": here.high[0],
                "layers": layers,
            }
        )
    return rows
