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
    header = ["mechanism", "parameters", "GFLOPs a token", "rows at once", "GB", "tokens/s", "speed", "hours", "cost"]
    return [header, *(prediction_row(name, one, plan.base) for name, one in plan.predictions.items())]


def prediction_row(name: str, one: PredictionRecord, base: PredictionRecord) -> list[str]:
    """The row of one mechanism."""
    cells = [name, f"{one.parameters:,}", f"{one.flops / 1e9:.2f}", str(one.micro_batch)]
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
    """Titles and tables: memory and time by part."""
    parts = list(plan.base.memory)
    memory = [["GB of each device", *parts, "all", "room"]]
    times = [["seconds of a step", *plan.base.seconds, "all"]]
    for name, one in plan.predictions.items():
        taken = (f"{one.memory[part] / 1e9:.2f}" for part in parts)
        memory.append([name, *taken, f"{one.peak / 1e9:.2f}", f"{one.room / 1e9:.1f}"])
        times.append([name, *(f"{value:.3g}" for value in one.seconds.values()), f"{one.step_seconds:.3g}"])
    return [("memory by part", memory), ("time by part", times)]


def misfits(plan: PlanPrediction) -> dict[str, str]:
    """For each mechanism that does not fit, why and what to try."""
    remedy = "a GPU with more memory" if plan.training.checkpointing else "--checkpointing or a GPU with more memory"
    return {
        name: f"{one.micro_batch} rows at once take {one.peak / 1e9:.1f} GB, but there are {one.room / 1e9:.1f}; try "
        f"{'a smaller --micro-batch, ' if one.micro_batch > 1 else ''}{remedy}"
        for name, one in plan.predictions.items()
        if not one.fits
    }


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
