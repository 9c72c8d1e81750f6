"""Does the analysis find what is there, and nothing else?"""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from tests.analysis.traces import HEADS, LAYERS, shuffled, traces
from varifocal.analysis.contrasts import adjusted, contrast, mean_with_interval, resample, sums_of
from varifocal.analysis.patterns import groups, pattern
from varifocal.analysis.token_table import TokenTable, bin_edges, position_bins


def found_in(table: TokenTable) -> dict[str, Any]:
    known = numpy.ones(len(table.documents), dtype=bool)
    resampling = resample(int(table.documents.max()) + 1, resamples=200)
    return pattern(table, known, resampling, heads=(LAYERS, HEADS))


def sure_heads(found: dict[str, Any]) -> set[tuple[str, int, int]]:
    """Kind, layer and head of every difference that survives the correction."""
    return {
        (row["kind"], int(layer), int(head))
        for row in found["by_kind_and_head"]
        for layer, head in zip(*numpy.nonzero(row["p_holm"] < 0.05), strict=True)
    }


def test_planted_pattern_is_found_where_it_is_and_nowhere_else() -> None:
    found = found_in(traces(planted=0.05))
    assert sure_heads(found) == {("number", 1, 2)}


def test_planted_difference_lies_in_its_interval() -> None:
    (row,) = (row for row in found_in(traces(planted=0.12))["by_kind"] if row["kind"] == "number")
    # In the mean over six heads a sixth of it is left.
    assert row["low"] < 0.02 < row["high"]
    assert row["p_holm"] < 0.05


def test_effect_is_the_difference_in_standard_deviations() -> None:
    table = traces(planted=0.1)
    (row,) = (row for row in found_in(table)["by_kind_and_head"] if row["kind"] == "number")
    assert row["effect"][1, 2] == pytest.approx(row["difference"][1, 2] / table.values[:, 5].std(), rel=1e-3)


def test_nothing_is_found_in_shuffled_traces() -> None:
    assert sure_heads(found_in(shuffled(traces(planted=0.05)))) == set()


def test_shuffled_traces_lead_to_few_claims_however_they_are_shuffled() -> None:
    # 40 families of 78 questions each: 5 % of the families may claim something, and chance allows 6 of 40.
    table = traces(planted=0.05, documents=12, length=120)
    claimed = sum(bool(sure_heads(found_in(shuffled(table, seed)))) for seed in range(40))
    assert claimed <= 6


def test_tokens_of_one_document_are_not_taken_for_independent() -> None:
    # A kind that fills whole documents differs only as documents differ.
    table = traces()
    whole = table.documents % 2 == 0
    honest = contrast(table, whole, ~whole, resample(20, resamples=200))
    alone = numpy.arange(len(table.documents))
    as_if = TokenTable(alone, table.positions, table.kinds, table.values)
    assert (contrast(as_if, whole, ~whole, resample(len(alone), resamples=30)).p_value < 1e-6).any()
    assert (honest.p_value > 0.05).all()


def test_position_is_not_taken_for_a_kind() -> None:
    # Gates that fall with position, and a kind that stands early: at equal position there is no difference.
    table = traces(length=256)
    early = numpy.random.default_rng(1).random(len(table.documents)) < 0.6 ** position_bins(table.positions)
    kinds = table.kinds.copy()
    kinds[:, 3] = early
    values = table.values - 0.1 * position_bins(table.positions)[:, None].astype(numpy.float32)
    moved = TokenTable(table.documents, table.positions, kinds, values)
    assert values[early].mean() - values[~early].mean() > 0.2
    assert "number" not in {kind for kind, *_ in sure_heads(found_in(moved))}


def test_mention_is_compared_with_content_words_only() -> None:
    table = traces()
    known = numpy.ones(len(table.documents), dtype=bool)
    _, inside, outside = next(group for group in groups(table.kinds, known) if group[0].name == "first mention")
    assert (table.kinds[inside | outside, 1]).all()


def test_far_text_is_compared_where_its_worth_is_known() -> None:
    table = traces()
    known = table.positions >= 64
    _, inside, outside = next(group for group in groups(table.kinds, known) if group[0].name == "far text helps")
    assert (known == (inside | outside)).all()


def test_value_that_means_nothing_is_left_out() -> None:
    table = traces(documents=3, length=50)
    values = table.values.copy()
    values[::2] = numpy.nan
    chosen = numpy.ones(len(values), dtype=bool)
    sums = sums_of(TokenTable(table.documents, table.positions, table.kinds, values), chosen, positions=False)
    assert (sums.counts == 25).all()
    assert sums.totals[:, 0] == pytest.approx(numpy.nansum(values.reshape(3, 50, -1), axis=1), rel=1e-5)


def test_gate_that_is_the_same_everywhere_shows_nothing() -> None:
    table = traces(documents=7, length=61)
    same = numpy.full_like(table.values, 0.3712)
    found = found_in(TokenTable(table.documents, table.positions, table.kinds, same))
    assert sure_heads(found) == set()
    assert all(row["difference"] == 0 for row in found["by_kind"])


def test_one_document_has_a_mean_and_no_interval() -> None:
    table = traces(documents=1)
    found = mean_with_interval(table, numpy.ones(len(table.documents), dtype=bool), resample(1, resamples=10))
    assert numpy.isfinite(found.mean).all()
    assert numpy.isnan(found.low).all()


def test_interval_of_a_mean_covers_it_about_as_often_as_it_says() -> None:
    # The documents' own means are normal around 0.5: 95 % of the intervals hold it, and chance allows 88 to 100 %.
    held = []
    for seed in range(60):
        table = traces(seed=seed, documents=8, length=20)
        found = mean_with_interval(table, numpy.ones(160, dtype=bool), resample(8, resamples=200, seed=seed))
        held.append((found.low < 0.5) & (found.high > 0.5))
    assert 0.88 <= numpy.mean(held) <= 1.0


def test_correction_counts_every_question_that_could_be_asked() -> None:
    assert adjusted(numpy.array([[0.01, numpy.nan], [0.04, 0.03]])) == pytest.approx(
        numpy.array([[0.03, numpy.nan], [0.06, 0.06]]), nan_ok=True
    )


def test_bins_are_powers_of_two() -> None:
    assert position_bins(numpy.array([0, 1, 2, 3, 4, 7, 8])).tolist() == [0, 1, 2, 2, 3, 3, 4]
    assert [bin_edges(place) for place in range(4)] == [(0, 0), (1, 1), (2, 3), (4, 7)]


def test_table_with_uneven_rows_is_refused() -> None:
    table = traces(documents=2, length=10)
    with pytest.raises(ValueError, match="one row for each token"):
        TokenTable(table.documents[:-1], table.positions, table.kinds, table.values)
