"""The papers' tables of memory and speed as the cost model sees them, for kernels and for prototypes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from varifocal.model.presets import preset
from varifocal.plan.paper_order import OrderCheck, order_checks
from varifocal.plan.plan import Training, predict
from varifocal.results.hardware import Hardware
from varifocal.results.papers import PaperTable, paper_tables

Way = Literal["our kernels", "prototype", "all written out"]
WAYS: tuple[Way, ...] = ("our kernels", "prototype", "all written out")
"""A prototype writes out the scores of all pairs for the paper's own mechanism, and runs the others in kernels."""
ROWS = 8
"""Rows that a device computes at once, as in our configs of the papers."""


def paper_predictions(
    way: Way, mechanisms: tuple[str, ...], hardware: Hardware, *, gpus: int = 8, context: int | None = None
) -> Mapping[Literal["memory", "speed"], Mapping[str, float]]:
    """Bytes and tokens a second of the papers' model with each mechanism."""
    found: dict[Literal["memory", "speed"], dict[str, float]] = {"memory": {}, "speed": {}}
    own = {table.own for table in paper_tables()}
    for name in mechanisms:
        config = preset(
            "qwen-134m", mechanism=name, **({} if context is None else {"max_position_embeddings": context})
        )
        training = Training(
            config=config,
            tokens=1e10,
            length=config.max_position_embeddings,
            batch=ROWS * gpus,
            devices=gpus,
            micro_batch=ROWS,
            execution="written out" if way == "all written out" or (way == "prototype" and name in own) else "kernels",
        )
        one = predict(training, hardware)
        found["memory"][name] = one.peak
        found["speed"][name] = one.tokens_per_second
    return found


class PaperCheck(NamedTuple):
    """One column of a paper's table beside the arithmetic, for each way of running it."""

    table: PaperTable
    ways: dict[Way, OrderCheck]


def paper_checks(hardware: Hardware, *, gpus: int = 8, context: int | None = None) -> list[PaperCheck]:
    """The columns of memory, speed and time of all papers, in the order of their tables."""
    found = []
    for table in paper_tables():
        if table.memory is None and table.speed is None and table.time is None:
            continue
        names = tuple(row.mechanism for row in table.rows)
        checks = [
            order_checks(table, paper_predictions(way, names, hardware, gpus=gpus, context=context)) for way in WAYS
        ]
        found += [PaperCheck(table, dict(zip(WAYS, columns, strict=True))) for columns in zip(*checks, strict=True)]
    return found
