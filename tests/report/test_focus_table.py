"""The tables of `varifocal measure`: differences are paired, and what was not measured is left empty."""

from __future__ import annotations

import pytest

from varifocal.report.focus import ruler_table, summary_table
from varifocal.results.focus import FocusMeasure, MapCache, MapFacts, MapLosses, MapRuler, MapSpeed


def losses(name: str, keep: float, *documents: float) -> MapLosses:
    return MapLosses(
        name=name, keep=keep, texts="novels", length=2048, heads="10", documents=tuple((one, one) for one in documents)
    )


def facts(name: str, keep: float, found: str) -> MapFacts:
    return MapFacts(name=name, keep=keep, length=1024, heads="10", depths=(0.1, 0.5, 0.9), found=found)


def speed(name: str, keep: float, prefill: float, decode: float) -> MapSpeed:
    return MapSpeed(
        name=name, keep=keep, length=8192, prefill_seconds=(prefill,), decode_milliseconds=decode, decode_spread=0.1,
        bytes_read=1, bound_milliseconds=1.0,
    )  # fmt: skip


@pytest.fixture
def result() -> FocusMeasure:
    return FocusMeasure(
        source="model", window=256, sinks=4, seed=0,
        losses=(losses("dense", 1.0, 2.0, 3.0, 4.0), losses("fit", 0.5, 2.1, 3.1), losses("random", 0.5, 2.5, 3.0, 5)),
        facts=(facts("dense", 1.0, "110"), facts("fit", 0.5, "101")),
        caches=tuple(
            MapCache(name=name, keep=keep, heads="10", bytes={"8192": size}, footprint={"8192": 1.0})
            for name, keep, size in (("dense", 1.0, 200), ("fit", 0.5, 104))
        ),
        speeds=(speed("transformers", 1.0, 9.0, 30.0), speed("dense", 1.0, 6.0, 15.0), speed("fit", 0.5, 3.0, 10.0)),
        ruler=tuple(
            MapRuler(name=name, keep=keep, task="vt", length=2048, heads="10", scores=scores)
            for name, keep, scores in (("dense", 1.0, (1.0, 0.5)), ("fit", 0.5, (1.0, 0.0)))
        ),
    )  # fmt: skip


def test_summary_tells_rises_facts_cache_and_speed(result: FocusMeasure) -> None:
    head, fit, random = summary_table(result)
    assert head[2:5] == ["novels, 2048 tokens", "facts found", "cache at 8192"]
    # Both documents rose by 0.1; dense finds two facts, of which the fit finds the first.
    assert fit == ["fit", "0.50", "+0.1000 ± 0.0000 (2)", "1 of 2", "0.52", "2.00, 3.00", "1.50, 3.00"]
    assert random[2].startswith("+0.5000 ± ")
    assert random[3:] == ["", "", "", ""]


def test_ruler_is_compared_question_by_question(result: FocusMeasure) -> None:
    _, dense, fit = ruler_table(result)
    assert dense[2:] == ["vt", "2048", "2", "0.75", ""]
    assert fit[5] == "0.50"
    assert fit[6].startswith("-0.2500 ± ")
