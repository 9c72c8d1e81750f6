"""The result of `varifocal plan` as tables and sentences."""

from __future__ import annotations

from varifocal.report.table import Table
from varifocal.results.prediction import PlanPrediction, PredictionRecord


def prediction_title(plan: PlanPrediction, preset: str) -> str:
    """What is trained, and on what."""
    wanted = plan.training
    return (
        f"{preset}, {wanted.tokens:,.0f} tokens in rows of {wanted.length}, {wanted.batch} rows a step, "
        f"{wanted.precision}, {wanted.devices} x {plan.hardware.name}"
    )


def prediction_table(plan: PlanPrediction) -> Table:
    """Header and rows: what each mechanism takes, with the time and cost of those that fit."""
    header = ["mechanism", "parameters", "GFLOP/token", "rows", "GB", "tokens/s", "speed", "hours", "cost"]
    return [header, *(prediction_row(name, one, plan.base) for name, one in plan.predictions.items())]


def prediction_row(name: str, one: PredictionRecord, base: PredictionRecord) -> list[str]:
    """The row of one mechanism."""
    cells = [name, f"{one.parameters / 1e6:,.1f}M", f"{one.flops / 1e9:.2f}", str(one.micro_batch)]
    if not one.fits:
        return [*cells, f"{one.peak / 1e9:.1f} !", "", "", "", "does not fit"]
    return [
        *cells,
        f"{one.peak / 1e9:.1f}",
        f"{one.tokens_per_second:,.0f}",
        f"{one.tokens_per_second / base.tokens_per_second:.2f}x",
        f"{one.hours:,.1f}",
        "" if one.cost is None else f"${one.cost:,.0f}",
    ]


def parts_tables(plan: PlanPrediction) -> list[tuple[str, Table]]:
    """Titles and tables: memory and time by part; parts that are the same for all mechanisms stand in the title."""
    memory = {name: {part: f"{taken / 1e9:.2f}" for part, taken in one.memory.items()} for name, one in rows_of(plan)}
    times = {name: {part: f"{taken:.3g}" for part, taken in one.seconds.items()} for name, one in rows_of(plan)}
    sums = {name: f"{one.peak / 1e9:.1f}" for name, one in rows_of(plan)}
    steps = {name: f"{one.step_seconds:.3g}" for name, one in rows_of(plan)}
    room = f"{plan.base.room / 1e9:.1f} GB"
    return [
        parts_table(f"memory by part, GB of each device (room for {room})", memory, sums),
        parts_table("time by part, seconds of a step", times, steps),
    ]


def rows_of(plan: PlanPrediction) -> list[tuple[str, PredictionRecord]]:
    return list(plan.predictions.items())


def parts_table(title: str, parts: dict[str, dict[str, str]], sums: dict[str, str]) -> tuple[str, Table]:
    """A title that names what all rows share, and a table of the rest."""
    first = next(iter(parts.values()))
    shared = [part for part in first if len(parts) > 1 and len({row[part] for row in parts.values()}) == 1]
    told = ", ".join(f"{part} {first[part]}" for part in shared if float(first[part]))
    shown = [part for part in first if part not in shared]
    rows = [
        ["mechanism", *shown, "all"],
        *([name, *(row[part] for part in shown), sums[name]] for name, row in parts.items()),
    ]
    return title + (f"; the same for all: {told}" if told else ""), rows


def misfits(plan: PlanPrediction) -> dict[str, str]:
    """For each mechanism that does not fit, why and what to try."""
    remedy = "a GPU with more memory" if plan.training.checkpointing else "--checkpointing or a GPU with more memory"
    return {
        name: f"{one.micro_batch} rows at once take {one.peak / 1e9:.1f} GB, but there are {one.room / 1e9:.1f}; try "
        f"{'a smaller --micro-batch, ' if one.micro_batch > 1 else ''}{remedy}"
        for name, one in plan.predictions.items()
        if not one.fits
    }


def limits_table(plan: PlanPrediction) -> tuple[str, Table]:
    """A title and a table: what each mechanism's step waits for on this device."""
    found = {name: one.limits for name, one in rows_of(plan) if one.fits and one.limits}
    columns = list(dict.fromkeys(part for limits in found.values() for part in limits))
    rows = [[name, *(f"{limits.get(part, 0):.0%}" for part in columns)] for name, limits in found.items()]
    return f"what a step waits for on a {plan.hardware.name}", [["mechanism", *columns], *rows]


def rates(plan: PlanPrediction) -> str:
    """The rates assumed for the device, and their source."""
    one = plan.hardware
    products = ", ".join(f"{name} {value / 1e12:.4g} TFLOP/s" for name, value in one.products.items())
    source = "measured here" if one.measured else "data sheet"
    return (
        f"({source}): {products}; {one.bandwidth / 1e9:,.0f} GB/s; {one.exponentials / 1e9:,.3g}e9 exponentials/s; "
        f"{one.memory / 1e9:.0f} GB"
    )


def assumed(plan: PlanPrediction) -> str:
    """All assumptions: they are neither counted nor measured."""
    return ", ".join(f"{name} {value:g}" for name, value in plan.assumptions.to_json().items())
