"""How far the tokens of a kind differ from others, with intervals from resampled documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from varifocal.analysis.token_table import Numbers, TokenTable, position_bins
from varifocal.statistics.estimates import holm
from varifocal.statistics.student import critical_value, two_sided_p

RESAMPLES = 500
"""Enough for a standard error that is itself known to 3 %."""


class Interval(NamedTuple):
    """Estimates [U] with their 95 % intervals; NaN where there are too few documents."""

    mean: Numbers
    low: Numbers
    high: Numbers


@dataclass(frozen=True, eq=False)
class Contrast:
    """Tokens of a kind compared with other tokens at equal position. All arrays are [U]."""

    difference: Numbers
    low: Numbers
    high: Numbers
    effect: Numbers
    """The difference in standard deviations between tokens."""
    p_value: Numbers
    mean: Numbers
    """The mean over the tokens of the kind."""
    tokens: int
    documents: int
    """Documents that have tokens of the kind."""


class Sums(NamedTuple):
    """Sums and counts of the values of some tokens, by document and position: [D, P, U] each."""

    totals: Numbers
    counts: Numbers


@dataclass(frozen=True, eq=False)
class Resampling:
    """Documents drawn with replacement: how often each was drawn."""

    weights: Numbers
    """[R, D]."""

    @property
    def documents(self) -> int:
        return int(self.weights.shape[1])

    def error(self, values: Numbers, clusters: int) -> Numbers:
        """The standard error [U] of estimates [R, U], corrected for few clusters; NaN for fewer than two."""
        if clusters < 2:
            return numpy.full(values.shape[1], numpy.nan)
        known = numpy.isfinite(values)
        counts = known.sum(axis=0)
        with numpy.errstate(invalid="ignore", divide="ignore"):
            mean = numpy.where(known, values, 0).sum(axis=0) / counts
            squares = numpy.where(known, (values - mean) ** 2, 0).sum(axis=0) / (counts - 1)
        return numpy.asarray(numpy.sqrt(squares * clusters / (clusters - 1)), dtype=numpy.float64)


def resample(documents: int, *, resamples: int = RESAMPLES, seed: int = 0) -> Resampling:
    """Draw as many documents as there are, `resamples` times."""
    generator = numpy.random.default_rng(seed)
    drawn = generator.multinomial(documents, numpy.full(documents, 1 / documents), size=resamples)
    return Resampling(drawn.astype(numpy.float64))


def sums_of(table: TokenTable, included: NDArray[numpy.bool_], *, positions: bool = True) -> Sums:
    """The sums over the included tokens [N]; with positions=False all positions count as one."""
    documents = int(table.documents.max()) + 1
    bins = position_bins(table.positions) if positions else numpy.zeros(len(table.positions), dtype=numpy.int64)
    many = int(position_bins(table.positions).max()) + 1 if positions else 1
    cells = (table.documents * many + bins)[included]
    values = table.values[included].astype(numpy.float64)
    known = numpy.isfinite(values)
    shape = (documents, many, values.shape[1])
    totals, counts = numpy.zeros((documents * many, shape[2])), numpy.zeros((documents * many, shape[2]))
    order = numpy.argsort(cells, kind="stable")
    if len(order):
        ordered = cells[order]
        starts = numpy.flatnonzero(numpy.diff(ordered, prepend=-1))
        totals[ordered[starts]] = numpy.add.reduceat(numpy.where(known, values, 0)[order], starts)
        counts[ordered[starts]] = numpy.add.reduceat(known[order].astype(numpy.float64), starts)
    return Sums(totals.reshape(shape), counts.reshape(shape))


def ratio(totals: Numbers, counts: Numbers) -> Numbers:
    """totals / counts, NaN where nothing was counted."""
    with numpy.errstate(invalid="ignore", divide="ignore"):
        return numpy.asarray(numpy.where(counts > 0, totals / counts, numpy.nan), dtype=numpy.float64)


def drawn(weights: Numbers, sums: Sums) -> Sums:
    """The sums [R, P, U] of resampled documents [R, D]."""
    documents, bins, units = sums.totals.shape
    totals, counts = (weights @ part.reshape(documents, -1) for part in sums)
    return Sums(totals.reshape(-1, bins, units), counts.reshape(-1, bins, units))


def stratified_difference(inside: Sums, outside: Sums) -> Numbers:
    """The mean difference [R, U] between two groups of tokens at equal position.

    A position with n tokens inside and m outside has the weight n m / (n + m), which makes the estimate most precise.
    """
    counted = inside.counts + outside.counts
    weights = ratio(inside.counts * outside.counts, counted)
    weights = numpy.nan_to_num(weights)
    ours, theirs = ratio(inside.totals, inside.counts), ratio(outside.totals, outside.counts)
    # Two means of the same number may differ in their last digits, which must not count as a difference.
    differences = numpy.where(numpy.isclose(ours, theirs, rtol=1e-9, atol=0.0), 0.0, ours - theirs)
    return ratio(numpy.where(weights > 0, weights * differences, 0).sum(axis=1), weights.sum(axis=1))


def contrast(
    table: TokenTable, inside: NDArray[numpy.bool_], outside: NDArray[numpy.bool_], resampling: Resampling
) -> Contrast:
    """The tokens `inside` [N] compared with those `outside` [N]."""
    ours, theirs = sums_of(table, inside), sums_of(table, outside)
    once = numpy.ones((1, resampling.documents))
    difference = stratified_difference(drawn(once, ours), drawn(once, theirs))[0]
    again = stratified_difference(drawn(resampling.weights, ours), drawn(resampling.weights, theirs))
    documents = int((ours.counts.sum(axis=1).max(axis=1) > 0).sum())
    error = resampling.error(again, documents)
    low, high = bounds(difference, error, documents)
    deviation = deviations(table.values[inside | outside])
    return Contrast(
        difference=difference,
        low=low,
        high=high,
        effect=ratio(difference, deviation),
        p_value=p_values(difference, error, documents),
        mean=ratio(ours.totals.sum(axis=(0, 1)), ours.counts.sum(axis=(0, 1))),
        tokens=int(ours.counts.sum(axis=(0, 1)).max(initial=0)),
        documents=documents,
    )


def mean_with_interval(table: TokenTable, included: NDArray[numpy.bool_], resampling: Resampling) -> Interval:
    """The mean over the included tokens [N]."""
    sums = sums_of(table, included, positions=False)
    mean = ratio(sums.totals.sum(axis=0), sums.counts.sum(axis=0))[0]
    resampled = drawn(resampling.weights, sums)
    again = ratio(resampled.totals, resampled.counts)[:, 0]
    documents = int((sums.counts.max(axis=(1, 2)) > 0).sum())
    return Interval(mean, *bounds(mean, resampling.error(again, documents), documents))


def bounds(estimate: Numbers, error: Numbers, clusters: int) -> tuple[Numbers, Numbers]:
    """The 95 % interval by Student's t with clusters - 1 degrees of freedom."""
    reach = error * critical_value(clusters - 1) if clusters > 1 else numpy.full_like(error, numpy.nan)
    return estimate - reach, estimate + reach


def p_values(estimate: Numbers, error: Numbers, clusters: int) -> Numbers:
    """The p-values of the two-sided t test that the estimate [U] is 0."""
    found = numpy.full(estimate.shape, numpy.nan)
    for unit in numpy.flatnonzero(numpy.isfinite(estimate) & numpy.isfinite(error)):
        if error[unit] > 0:
            found[unit] = two_sided_p(float(estimate[unit] / error[unit]), clusters - 1)
        else:
            found[unit] = 1.0 if estimate[unit] == 0 else 0.0
    return found


def deviations(values: NDArray[numpy.float32]) -> Numbers:
    """The standard deviation [U] of values [N, U], ignoring NaN."""
    known = numpy.isfinite(values)
    counts = known.sum(axis=0)
    wide = numpy.where(known, values, 0).astype(numpy.float64)
    mean = ratio(wide.sum(axis=0), counts)
    return numpy.sqrt(ratio(numpy.where(known, (wide - mean) ** 2, 0).sum(axis=0), counts))


def adjusted(p_value: Numbers) -> Numbers:
    """p-values of any shape after Holm's correction for all of them together; NaN stays NaN."""
    flat = [None if numpy.isnan(p) else float(p) for p in p_value.ravel()]
    corrected = [numpy.nan if p is None else p for p in holm(flat)]
    return numpy.array(corrected, dtype=numpy.float64).reshape(p_value.shape)
