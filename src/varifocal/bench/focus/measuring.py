"""Everything that is measured of a focused model, part by part: what a result holds already is left as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from varifocal.bench.focus.speed import time_maps
from varifocal.results.focus import FocusMap, FocusMeasure
from varifocal.retrofit.focus.comparison import (
    DENSE,
    Contestant,
    Journal,
    Kinds,
    Measuring,
    OnCount,
    Texts,
    contestants,
    fresh_result,
    measure_ruler,
    measure_texts,
    no_kinds,
    open_measured,
)
from varifocal.retrofit.focus.focusing import Opened
from varifocal.retrofit.focus.footprint import measure_caches


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What is measured."""

    texts: Measuring
    """The maps, and what is measured on texts."""
    caches: tuple[int, ...] = ()
    """Lengths of prompts whose caches are measured."""
    speed: tuple[int, ...] = ()
    """Lengths of prompts after which speed is measured."""
    rounds: int = 2


def measure_focused(
    folders: Sequence[Path],
    source: str | Path,
    sources: Sequence[Texts],
    parts: Parts,
    *,
    file: Path | None = None,
    kinds: Kinds = no_kinds,
    on_count: OnCount = lambda what, done, total: None,
) -> FocusMeasure:
    """Measure what `varifocal focus` made beside the model that it came from.

    Args:
        folders: focused models; the first one's maps are those that are timed.
        source: the dense model.
        sources: long documents, others than those of the fit.
        parts: what is measured.
        file: a result that is continued, and written after every addition.
        kinds: which tokens are of which kind, to tell what is lost where.
        on_count: called with what is measured, how much of it is done, and how much there is.
    """
    wanted = parts.texts
    if (wanted.documents or wanted.questions or wanted.curve_length) and not sources:
        raise ValueError("losses and facts are measured on texts; give --texts, or --documents 0 --questions 0")
    opened, record = open_measured(folders[0], source)
    records = [(folder, FocusMap.read(folder / FocusMap.filename)) for folder in folders]
    maps = contestants(opened, records, wanted, source=source)
    journal = Journal.open(file, fresh_result(opened, record.source, wanted.seed))
    if parts.caches:
        add_caches(journal, maps, parts.caches)
    add_speeds(journal, opened, maps, parts, on_count=on_count)
    if sources:
        measure_texts(opened, maps, sources, wanted, journal, kinds=kinds, on_count=on_count)
    if wanted.ruler:
        measure_ruler(opened, maps, wanted, journal, on_count=on_count)
    return journal.result


def add_caches(journal: Journal, maps: Sequence[Contestant], lengths: tuple[int, ...]) -> None:
    """Bytes and footprints of all maps, in the place of those that were there."""
    new = measure_caches(maps, lengths)
    names = {(row.name, row.keep) for row in new}
    kept = [row for row in journal.result.caches if (row.name, row.keep) not in names]
    journal.change(caches=(*new, *kept))


def add_speeds(
    journal: Journal, opened: Opened, maps: Sequence[Contestant], parts: Parts, *, on_count: OnCount
) -> None:
    """Speeds after prompts of these lengths, but for those that are there; of dense and the first fit's maps."""
    fitted = next((one.name for one in maps if one.name != DENSE), DENSE)
    those = [one for one in maps if one.name in (DENSE, fitted) and not one.adapted]
    for length in parts.speed:
        if not any(row.length == length for row in journal.result.speeds):
            rows = time_maps(opened, those, length, rounds=parts.rounds, on_count=on_count)
            journal.change(speeds=(*journal.result.speeds, *rows))
