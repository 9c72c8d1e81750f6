"""Maps of all shares measured side by side on the same tokens: the fitted ones beside chance and whole layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from varifocal.environment import environment
from varifocal.results.focus import FocusMap, FocusMeasure, FocusRow
from varifocal.retrofit.focus.decide import (
    Map,
    heads_of_share,
    keep_at_random,
    keep_highest,
    keep_layers_in_turn,
    share_of,
)
from varifocal.retrofit.focus.fit import FitPlan
from varifocal.retrofit.focus.focusing import Opened, open_dense
from varifocal.retrofit.focus.measure import FactFound, facts_found, loss_by_position, questions
from varifocal.retrofit.focus.texts import FactRow, Library
from varifocal.statistics.estimates import estimate, paired_difference

SHARES = (1 / 2, 1 / 3, 1 / 4)
DEPTHS = 10
CACHE_LENGTHS = (2048, 4096, 8192)


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """What to measure on."""

    length: int = 2048
    documents: int = 16
    questions: int = 30
    """Facts asked for at each of `fact_lengths`."""
    fact_lengths: tuple[int, ...] = (1024, 2048)
    shares: tuple[float, ...] = SHARES
    rival_shares: tuple[float, ...] = SHARES
    """Where chance and whole layers are measured too."""
    random_maps: int = 1
    seed: int = 0


def measure_folder(
    folder: Path,
    source: str | Path,
    texts: Iterable[str],
    wanted: Measuring,
    *,
    named: str = "texts",
    on_row: Callable[[int, int], None] = lambda done, total: None,
) -> FocusMeasure:
    """The scores in a focused model's folder, measured beside the dense model that they are of; see measure_maps."""
    record = FocusMap.read(folder / FocusMap.filename)
    plan = fit_plan(record)
    opened = open_dense(source, plan)
    layers, heads = opened.gated.layers, opened.gated.kv_heads
    if len(record.heads) != layers * heads:
        raise ValueError(
            f"{source} has {layers * heads} key heads, and {folder / FocusMap.filename} is a map of "
            f"{len(record.heads)}; give the model that was focused"
        )
    return measure_maps(opened, record, texts, wanted, named=named, on_row=on_row)


def measure_maps(
    opened: Opened,
    record: FocusMap,
    texts: Iterable[str],
    wanted: Measuring,
    *,
    named: str = "texts",
    on_row: Callable[[int, int], None] = lambda done, total: None,
) -> FocusMeasure:
    """The losses and the facts found by the dense model, by the record's scores at several shares, and by rivals.

    Args:
        opened: the model with the gates of the fit.
        record: its scores.
        texts: long documents, others than those of the fit.
        wanted: how much of what.
        named: what the documents are called in the result.
        on_row: called after each text with how many are done, and how many there are.
    """
    gated = opened.gated
    longest = max(wanted.length, *wanted.fact_lengths) if wanted.questions else wanted.length
    check_length(opened, longest)
    library = Library(texts, opened.tokenizer, least=longest, most=max(wanted.documents, 40))
    rows = library.passages(wanted.length, wanted.documents)
    asked: list[FactRow] = []
    if wanted.questions:
        repeats = -(-wanted.questions // DEPTHS)
        asked = questions(library, wanted.fact_lengths, depths=DEPTHS, repeats=repeats, seed=wanted.seed)
    maps = rivals(record, opened, wanted)
    done, total = 0, (len(maps) + 1) * (len(rows) + len(asked))

    def count() -> None:
        nonlocal done
        done += 1
        on_row(done, total)

    with gated.reading("everything"):
        dense = loss_by_position(gated, rows, on_row=count)
        known = facts_found(gated, asked, on_row=count)
    measured = []
    for name, full in maps:
        with gated.by_map(full):
            losses = loss_by_position(gated, rows, on_row=count)
            found = facts_found(gated, asked, on_row=count)
        measured.append(row_of(name, full, dense, losses, known, found, opened))
    return FocusMeasure(
        source=record.source, texts=named, length=wanted.length, documents=len(rows),
        dense_loss=estimate(dense.mean(dim=1).tolist()),
        dense_curve=tuple(float(part.mean()) for part in dense.chunk(8, dim=1)),
        dense_found=by_length(known),
        rows=tuple(measured), environment=environment(),
    )  # fmt: skip


def fit_plan(record: FocusMap) -> FitPlan:
    """The plan that a map was made by."""
    try:
        return FitPlan(**{**record.fit, "lengths": tuple(record.fit["lengths"])})
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"the fit of a head map cannot be read: {error}; make the map again") from error


def check_length(opened: Opened, length: int) -> None:
    """ValueError if texts are longer than what the model was made for."""
    most = opened.gated.model.config.max_position_embeddings
    if length > most:
        raise ValueError(f"the model reads {most} tokens, and texts of {length} are to be measured; give shorter ones")


def by_length(found: list[FactFound]) -> dict[str, float]:
    """The share of facts found, by the length of the text."""
    lengths = sorted({one.length for one in found})
    each = {length: [one.found for one in found if one.length == length] for length in lengths}
    return {str(length): sum(those) / len(those) for length, those in each.items()}


def rivals(record: FocusMap, opened: Opened, wanted: Measuring) -> list[tuple[str, Map]]:
    """All maps: by the scores, by chance and by layers at each share, and all heads windowed."""
    layers, heads = opened.gated.layers, opened.gated.kv_heads
    scores = torch.tensor([one.score for one in record.heads]).view(layers, heads)
    found: list[tuple[str, Map]] = []
    for share in dict.fromkeys((*wanted.shares, *wanted.rival_shares)):
        count = heads_of_share(share, layers * heads)
        if share in wanted.shares:
            found.append((str(record.fit["way"]), keep_highest(scores, count)))
        if share not in wanted.rival_shares:
            continue
        for number in range(wanted.random_maps):
            found.append(("random", keep_at_random(layers, heads, count, wanted.seed + number)))
        found.append(("layers in turn", keep_layers_in_turn(layers, heads, count)))
    found.append(("all windowed", keep_highest(scores, 0)))
    return found


def row_of(
    name: str, full: Map, dense: Tensor, losses: Tensor, known: list[FactFound], found: list[FactFound], opened: Opened
) -> FocusRow:
    """What one map costs against the dense model."""
    sizes = opened.sizes
    everything = tuple((True,) * sizes.kv_heads for _ in range(sizes.layers))
    half = dense.shape[1] // 2
    answered = [two for one, two in zip(known, found, strict=True) if one.found]
    by_depth = [[one.found for one in answered if int(one.depth * DEPTHS) == place] for place in range(DEPTHS)]
    return FocusRow(
        name=name, keep=share_of(full),
        loss=paired_difference(losses.mean(dim=1).tolist(), dense.mean(dim=1).tolist()),
        far_loss=paired_difference(losses[:, half:].mean(dim=1).tolist(), dense[:, half:].mean(dim=1).tolist()),
        found=estimate([float(one.found) for one in answered]) if answered else None,
        found_by_length=by_length(answered),
        found_by_depth=tuple(sum(one) / len(one) if one else None for one in by_depth) if answered else None,
        cache={
            str(length): sizes.of_map(full, length) / sizes.of_map(everything, length) for length in CACHE_LENGTHS
        },
    )  # fmt: skip
