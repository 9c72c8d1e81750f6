"""A pilot as tables and sentences: what far text is worth, and what a comparison will be able to tell."""

from __future__ import annotations

import math

from varifocal.report.table import Table
from varifocal.results.pilot import Pilot
from varifocal.statistics.power import can_tell


def context_table(pilot: Pilot) -> Table:
    """Header and rows: what the text beyond each window is worth to the baseline."""
    header = ["text that is seen", "rise of the loss", "rows"]
    body = [
        [
            f"{one.window // 2} to {one.window} of {pilot.length} tokens",
            f"{one.worth.mean:+.4f}" + ("" if one.worth.half_width is None else f" ± {one.worth.half_width:.4f}"),
            str(one.worth.count),
        ]
        for one in pilot.context
    ]
    return [header, *body]


def power_table(pilot: Pilot) -> Table:
    """Header and rows: the seeds that each effect needs."""
    header = ["effect (nats a token)", "seeds", "if the spread is at its limit"]
    return [header, *([f"{one.effect:g}", many(one.seeds), many(one.at_limit)] for one in pilot.needed)]


def many(seeds: int | None) -> str:
    """A number of seeds."""
    return "more than 1,000" if seeds is None else f"{seeds:,}"


def findings(pilot: Pilot) -> list[str]:
    """A sentence each on spread, far text, the plan's power and its cost."""
    spread, base = pilot.difference.deviation, pilot.losses[pilot.baseline]
    assert spread is not None
    seeds = " and ".join(map(str, pilot.seeds))
    hours = pilot.seconds * pilot.planned_cells / 3600
    said = [
        f"Paired spread of {pilot.arm} against {pilot.baseline}, seeds {seeds}: {spread:.4f} nats a token, and below "
        f"{pilot.spread_limit:.4f} in four of five such pilots; {pilot.baseline} alone spreads by "
        f"{base.deviation or 0.0:.4f}.",
        far_text(pilot),
        power(pilot, seeds=pilot.planned_seeds, differences=pilot.planned_differences),
        f"The plan's {pilot.planned_cells} cells take about {hours:.2g} hours of training.",
    ]
    return [one for one in said if one]


def far_text(pilot: Pilot) -> str:
    """How far text is worth anything, as far as the intervals tell."""
    known = [one for one in pilot.context if one.worth.half_width is not None]
    worth = [one for one in known if one.worth.mean > (one.worth.half_width or 0)]
    if not known:
        return ""
    if not worth:
        return (
            f"Text more than {known[0].window} tokens back is worth nothing that shows: how a mechanism reads it does "
            "not tell it from others here."
        )
    last = worth[-1]
    return (
        f"Text more than {last.window} tokens back is worth {last.worth.mean:.4f} nats a token"
        + (", and beyond the next window nothing that shows." if last is not known[-1] else ".")
        + f" A mechanism that does not read it loses about that much of {pilot.baseline}'s loss at most."
    )


def power(pilot: Pilot, *, seeds: int, differences: int) -> str:
    """What so many seeds can tell, and whether that is enough."""
    if not pilot.difference.deviation:
        return (
            f"{pilot.arm} had the same difference from {pilot.baseline} with every seed, so that this pilot tells no "
            "spread."
        )
    least = can_tell(pilot, seeds=seeds, differences=differences)
    asked = f"{differences} difference{'' if differences == 1 else 's'}"
    if math.isinf(least):
        told = "One seed tells no difference from chance"
    else:
        at_limit = can_tell(pilot, seeds=seeds, differences=differences, limit=True)
        told = (
            f"{seeds} seeds and {asked} tell effects from {least:.2g} nats a token on in four of five repetitions "
            f"({at_limit:.2g} if the spread is at its limit)"
        )
    return f"{told}.{'' if pilot.smallest_effect is None else f' {enough(pilot, least)}'}"


def enough(pilot: Pilot, least: float) -> str:
    """Whether the smallest interesting effect can be told."""
    effect = pilot.smallest_effect
    assert effect is not None
    if least <= effect:
        return f"The smallest interesting effect, {effect:g}, can be told."
    needed = next((one for one in pilot.needed if one.effect == effect), None)
    wanted = "" if needed is None else f"; it needs {many(needed.seeds)} seeds"
    return f"It could not tell its smallest interesting effect, {effect:g}{wanted}."
