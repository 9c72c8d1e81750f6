"""What maps of heads cost and save, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from varifocal.results.estimates import Difference, Estimate
from varifocal.results.focus import FocusMeasure, MapFacts, MapLosses, MapSpeed
from varifocal.statistics.estimates import estimate, paired_difference

DENSE, TRANSFORMERS = "dense", "transformers"
Table = list[list[str]]


def rise(row: MapLosses, dense: MapLosses, *, half: int | None = None) -> Difference:
    """The rise of the loss over the dense model's on the same documents; of half 0 or 1 of their text if given."""
    middle = len(dense.documents[0]) // 2
    part = {None: slice(None), 0: slice(0, middle), 1: slice(middle, None)}[half]

    def means(those: MapLosses) -> list[float]:
        return [sum(one[part]) / len(one[part]) for one in those.documents[:count]]

    count = min(len(row.documents), len(dense.documents))
    return paired_difference(means(row), means(dense))


def dense_losses(result: FocusMeasure, texts: str, length: int) -> MapLosses | None:
    """What the dense model loses on these texts."""
    return next(
        (row for row in result.losses if (row.name, row.texts, row.length) == (DENSE, texts, length)),
        None,
    )


def compared_losses(result: FocusMeasure) -> list[tuple[MapLosses, MapLosses]]:
    """Every map's losses with the dense model's on the same texts."""
    found = []
    for row in result.losses:
        dense = dense_losses(result, row.texts, row.length)
        if row.name != DENSE and dense is not None:
            found.append((row, dense))
    return found


def kept_facts(result: FocusMeasure, row: MapFacts) -> tuple[list[float], list[bool]]:
    """The depths of the facts that the dense model finds, and whether this map finds them too."""
    dense = next((one for one in result.facts if (one.name, one.length) == (DENSE, row.length)), None)
    if dense is None:
        return [], []
    both = zip(row.depths, row.found, dense.found, strict=False)
    known = [(depth, found == "1") for depth, found, first in both if first == "1"]
    return [depth for depth, _ in known], [found for _, found in known]


def facts_of(result: FocusMeasure, name: str, keep: float, *, length: int | None = None) -> Estimate | None:
    """The share of facts found of those that the dense model finds; None if none was asked for."""
    found: list[bool] = []
    for row in result.facts:
        if (row.name, row.keep) == (name, keep) and length in (None, row.length):
            found += kept_facts(result, row)[1]
    return estimate([float(one) for one in found]) if found else None


def loss_table(result: FocusMeasure) -> Table:
    """A row for each map and source of texts, with 95 % intervals over documents."""
    table = [["heads by", "keep", "texts", "documents", "rise of the loss", "upper end", "second half"]]
    for row, dense in compared_losses(result):
        whole, far = rise(row, dense), rise(row, dense, half=1)
        table.append(
            [
                row.name, f"{row.keep:.2f}", f"{row.texts}, {row.length}", str(whole.count), told(whole),
                f"{whole.mean + (whole.half_width or 0):+.4f}", told(far),
            ]
        )  # fmt: skip
    return table


def summary_table(result: FocusMeasure) -> Table:
    """A row for each map: what it loses on each source of texts, facts found, its share of the cache, its speed."""
    compared = compared_losses(result)
    sources = list(dict.fromkeys((row.texts, row.length) for row, _ in compared))
    maps = list(dict.fromkeys((row.name, row.keep) for row, _ in compared))
    cache = cache_shares(result)
    longest = max(cache, default=0)
    after = max((row.length for row in result.speeds), default=0)
    table = [["heads by", "keep", *(f"{texts}, {length} tokens" for texts, length in sources), "facts found"]]
    table[0] += [f"cache at {longest}"] * bool(cache)
    table[0] += [f"prefill of {after}, x dense, x transformers", "decoding after it"] * bool(after)
    for name, keep in maps:
        cells = []
        for source in sources:
            those = [one for one in compared if (one[0].name, one[0].keep) == (name, keep)]
            rises = [rise(row, dense) for row, dense in those if (row.texts, row.length) == source]
            cells.append(f"{told(rises[0])} ({rises[0].count})" if rises else "")
        found = [kept_facts(result, row)[1] for row in result.facts if (row.name, row.keep) == (name, keep)]
        asked = sum(map(len, found))
        cells.append(f"{sum(map(sum, found))} of {asked}" if asked else "")
        if cache:
            share = cache[longest].get((name, keep))
            cells.append("" if share is None else f"{share:.2f}")
        if after:
            cells += speed_cells(result, name, keep, after)
        table.append([name, f"{keep:.2f}", *cells])
    return table


def cache_shares(result: FocusMeasure) -> dict[int, dict[tuple[str, float], float]]:
    """By length and map, the bytes of the cache against the dense model's."""
    dense = next((row for row in result.caches if row.name == DENSE), None)
    if dense is None:
        return {}
    return {
        int(length): {(row.name, row.keep): row.bytes[length] / size for row in result.caches}
        for length, size in dense.bytes.items()
    }


def speed_cells(result: FocusMeasure, name: str, keep: float, length: int) -> list[str]:
    """How many times as fast as dense and as transformers a prompt is read, and decoded after; empty if not timed."""
    row = next((one for one in result.speeds if (one.name, one.keep, one.length) == (name, keep, length)), None)
    if row is None:
        return ["", ""]
    rivals = [speed_of(result, rival, length) for rival in (DENSE, TRANSFORMERS)]
    prefill = [times(median(one.prefill_seconds) if one else None, median(row.prefill_seconds)) for one in rivals]
    decode = [times(one.decode_milliseconds if one else None, row.decode_milliseconds) for one in rivals]
    return [", ".join(prefill), ", ".join(decode)]


def told(one: Difference) -> str:
    """A difference with half of its interval."""
    return f"{one.mean:+.4f} ± {one.half_width or 0:.4f}"


def curve_table(result: FocusMeasure) -> Table:
    """The dense model's own loss by position, for each source of texts and length."""
    rows = [row for row in result.losses if row.name == DENSE]
    table = [["texts", "documents", "tokens", "loss"]]
    for row in rows:
        parts = len(row.documents[0])
        for number in range(parts):
            first, last = (row.length * place // parts for place in (number, number + 1))
            mean = sum(one[number] for one in row.documents) / len(row.documents)
            table.append([row.texts, str(len(row.documents)), f"{first} to {last}", f"{mean:.4f}"])
    return table


def fact_table(result: FocusMeasure) -> Table:
    """Facts found of those that the dense model finds, by length and by fifth of the text."""
    table = [["heads by", "keep", "tokens", "found", "of", *(f"{part / 5:.1f}" for part in range(5))]]
    for row in result.facts:
        if row.name == DENSE:
            depths, found = list(row.depths), [one == "1" for one in row.found]
        else:
            depths, found = kept_facts(result, row)
        fifths = []
        for part in range(5):
            those = [one for depth, one in zip(depths, found, strict=True) if min(4, int(depth * 5)) == part]
            fifths.append(f"{sum(those)} of {len(those)}")
        table.append([row.name, f"{row.keep:.2f}", str(row.length), str(sum(found)), str(len(found)), *fifths])
    return table


def ruler_table(result: FocusMeasure) -> Table:
    """The share of right answers in RULER's tasks, with 95 % intervals of what was lost over questions."""
    table = [["heads by", "keep", "task", "tokens", "questions", "right", "against dense"]]
    for row in result.ruler:
        dense = next(
            (one for one in result.ruler if (one.name, one.task, one.length) == (DENSE, row.task, row.length)), None
        )
        count = len(row.scores) if dense is None else min(len(row.scores), len(dense.scores))
        against = ""
        if dense is not None and row is not dense:
            against = told(paired_difference(row.scores[:count], dense.scores[:count]))
        right = sum(row.scores[:count]) / count
        table.append([row.name, f"{row.keep:.2f}", row.task, str(row.length), str(count), f"{right:.2f}", against])
    return table


def cache_table(result: FocusMeasure) -> Table:
    """Megabytes of the cache and their share of dense, and the footprint of a request."""
    dense = next((row for row in result.caches if row.name == DENSE), None)
    if dense is None:
        return []
    lengths = list(dense.bytes)
    table = [["heads by", "keep", *(f"MB at {one}" for one in lengths), *(f"request of {one}" for one in lengths)]]
    for row in result.caches:
        sizes = [f"{row.bytes[one] / 1e6:.1f} ({row.bytes[one] / dense.bytes[one]:.2f})" for one in lengths]
        table.append([row.name, f"{row.keep:.2f}", *sizes, *(f"{row.footprint[one]:.2f}" for one in lengths)])
    return table


def speed_table(result: FocusMeasure) -> Table:
    """Prefill and decoding beside dense, transformers and what memory gives."""
    against = ["x dense", "x transformers"]
    table = [["heads by", "keep", "tokens", "prefill s", *against, "tokens/s", *against, "bound, tokens/s"]]
    for row in result.speeds:
        rivals = [speed_of(result, name, row.length) for name in (DENSE, TRANSFORMERS)]
        prefill = [times(median(one.prefill_seconds) if one else None, median(row.prefill_seconds)) for one in rivals]
        decode = [times(one.decode_milliseconds if one else None, row.decode_milliseconds) for one in rivals]
        table.append(
            [
                row.name, f"{row.keep:.2f}", str(row.length), f"{median(row.prefill_seconds):.2f}", *prefill,
                f"{1e3 / row.decode_milliseconds:.1f}", *decode, f"{1e3 / row.bound_milliseconds:.1f}",
            ]
        )  # fmt: skip
    return table


def speed_of(result: FocusMeasure, name: str, length: int) -> MapSpeed | None:
    """The speed of a contender after so many tokens."""
    return next((one for one in result.speeds if (one.name, one.length) == (name, length)), None)


def times(theirs: float | None, ours: float) -> str:
    """How many times as fast; empty where the other was not timed."""
    return "" if theirs is None else f"{theirs / ours:.2f}"


def median(values: Sequence[float]) -> float:
    """The middle one."""
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
