"""A comparison's run directories as one result: what each arm reached over its seeds, and what sets it apart."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from varifocal.statistics.estimates import Difference, Estimate, estimate, holm, paired_difference

PLAN, RESULT = "plan.json", "comparison.json"


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """What one arm (a mechanism with its options) reached. Estimates are over seeds."""

    name: str
    reference: str | None
    """The arm that this one is an ablation of."""
    seeds: tuple[int, ...]
    parameters: int
    validation_loss: Estimate
    difference: Difference | None
    """To the baseline, in validation loss; None for the baseline itself."""
    adjusted_p: float | None
    """p of that difference after Holm's correction for all arms."""
    to_reference: Difference | None
    bits_per_byte: Estimate
    test_loss: Estimate | None
    test_difference: Difference | None
    peak_bytes: Estimate | None
    memory_ratio: float | None
    tokens_per_second: Estimate
    speed_ratio: float | None
    seconds: Estimate
    recall: dict[str, Estimate] = field(default_factory=dict)
    """Accuracy by distance, for a probe."""


@dataclass(frozen=True)
class Comparison:
    """The content of comparison.json."""

    content: dict[str, Any]

    @property
    def baseline(self) -> str:
        name: str = self.content["baseline"]
        return name

    @property
    def setting(self) -> dict[str, Any]:
        """Data and budget that all cells share."""
        setting: dict[str, Any] = self.content["setting"]
        return setting

    def cells(self, arm: str) -> dict[int, dict[str, Any]]:
        """The finished cells of an arm by seed."""
        return {cell["seed"]: cell for cell in self.content["cells"] if cell["arm"] == arm}

    @cached_property
    def results(self) -> tuple[ArmResult, ...]:
        """One for each arm that has a finished cell, in the order of the plan."""
        arms = [arm for arm in self.content["arms"] if self.cells(arm["name"])]
        differences = [self.difference(arm["name"], self.baseline, "validation_loss") for arm in arms]
        adjusted = holm([None if one is None else one.p_value for one in differences])
        return tuple(
            self.result(arm, difference, p) for arm, difference, p in zip(arms, differences, adjusted, strict=True)
        )

    def result(self, arm: Mapping[str, Any], difference: Difference | None, adjusted_p: float | None) -> ArmResult:
        """The estimates of one arm."""
        name, reference = arm["name"], arm.get("reference")
        cells = self.cells(name)
        distances = next(iter(cells.values())).get("recall", {})
        return ArmResult(
            name=name,
            reference=reference,
            seeds=tuple(cells),
            parameters=next(iter(cells.values()))["parameters"],
            validation_loss=estimate(values(cells, "validation_loss")),
            difference=difference,
            adjusted_p=adjusted_p,
            to_reference=None if reference is None else self.difference(name, reference, "validation_loss"),
            bits_per_byte=estimate(values(cells, "bits_per_byte")),
            test_loss=estimate(tests) if (tests := values(cells, "test_loss")) else None,
            test_difference=self.difference(name, self.baseline, "test_loss"),
            peak_bytes=estimate(peaks) if (peaks := values(cells, "peak_bytes")) else None,
            memory_ratio=self.ratio(name, "peak_bytes"),
            tokens_per_second=estimate(values(cells, "tokens_per_second")),
            speed_ratio=self.ratio(name, "tokens_per_second"),
            seconds=estimate(values(cells, "seconds")),
            recall={
                distance: estimate([cell["recall"][distance]["accuracy"] for cell in cells.values()])
                for distance in distances
            },
        )

    def pairs(self, arm: str, other: str, what: str) -> tuple[list[float], list[float]]:
        """A value of two arms, for the seeds that both have."""
        ours, theirs = self.cells(arm), self.cells(other)
        shared = [
            seed for seed in ours if seed in theirs and None not in (ours[seed].get(what), theirs[seed].get(what))
        ]
        return [ours[seed][what] for seed in shared], [theirs[seed][what] for seed in shared]

    def difference(self, arm: str, other: str, what: str) -> Difference | None:
        """The paired difference of two arms; None if they share no seed or are one arm."""
        ours, theirs = self.pairs(arm, other, what)
        return paired_difference(ours, theirs) if ours and arm != other else None

    def ratio(self, arm: str, what: str) -> float | None:
        """The mean of an arm over that of the baseline, for the seeds that both have."""
        ours, theirs = self.pairs(arm, self.baseline, what)
        return sum(ours) / sum(theirs) if sum(theirs) else None

    def as_json(self) -> dict[str, Any]:
        """The content of comparison.json, with the estimates for those who read no Python."""
        return self.content | {"results": [asdict(result) for result in self.results]}


def values(cells: Mapping[int, Mapping[str, Any]], what: str) -> list[float]:
    """A value of every cell that has it."""
    return [cell[what] for cell in cells.values() if cell.get(what) is not None]


def gather_comparison(folder: Path) -> Comparison:
    """The finished cells of a comparison folder; ValueError if there is none."""
    plan = read_json(folder / PLAN, what="the plan of a comparison")
    cells = []
    for arm in plan["arms"]:
        for seed in plan["seeds"]:
            run = folder / "cells" / f"{arm['name']}-seed{seed}"
            if (run / "summary.json").is_file():
                cells.append({"arm": arm["name"], "seed": seed, **read_cell(run)})
    if not cells:
        raise ValueError(f"no cell of {folder} is finished; run the same comparison again, it goes on where it stopped")
    return Comparison({
        "experiment": "comparison",
        "title": plan["title"],
        "baseline": plan["baseline"],
        "seeds": plan["seeds"],
        "setting": {
            "data": plan["data"],
            "workers": plan["workers"],
            **read_setting(folder / "cells" / f"{cells[0]['arm']}-seed{cells[0]['seed']}", cells),
        },
        "environment": plan.get("environment", {}),
        "arms": plan["arms"],
        "cells": cells,
    })  # fmt: skip


def read_comparison(path: Path) -> Comparison:
    """A comparison.json, or the folder that holds one; ValueError unless it is one."""
    file = path / RESULT if path.is_dir() else path
    content = read_json(file, what="a comparison")
    if content.get("experiment") != "comparison":
        raise ValueError(f"{file} is not a result of 'varifocal compare'; give its folder or its {RESULT}")
    return Comparison(content)


def read_cell(run: Path) -> dict[str, Any]:
    """What a finished run says of itself, its loss on the test split, and its validation curve."""
    summary = read_json(run / "summary.json", what="the summary of a run")
    cell = {
        name: summary.get(name)
        for name in (
            "parameters", "steps", "tokens", "validation_loss", "bits_per_byte", "seconds", "tokens_per_second",
            "peak_bytes", "data_fingerprint",
        )
    }  # fmt: skip
    if (run / "test.json").is_file():
        cell |= read_json(run / "test.json", what="the test of a run")
    return cell | {"curve": read_curve(run / "metrics.jsonl")}


def read_curve(file: Path) -> list[tuple[int, float]]:
    """Tokens and validation loss at each validation. Of a step that was validated twice, the later one counts."""
    points: dict[int, float] = {}
    if file.is_file():
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue  # a line that a killed process did not finish; the run wrote it again
            if "validation_loss" in entry:
                points[entry["tokens"]] = entry["validation_loss"]
    return sorted(points.items())


def read_setting(run: Path, cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sizes and the budget that every cell shares."""
    try:
        config = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"cannot read {run / 'config.toml'} as the config of a run: {error}") from error
    optimization, model = (config.get(name, {}) for name in ("optimization", "model"))
    counts = [cell["parameters"] for cell in cells]
    return {
        "parameters": [min(counts), max(counts)],
        "tokens": max(cell["tokens"] for cell in cells),
        "steps": max(cell["steps"] for cell in cells),
        "batch": optimization.get("batch"),
        "length": optimization.get("length"),
        "precision": optimization.get("precision"),
        "preset": model.get("preset"),
    }


def read_json(file: Path, *, what: str) -> dict[str, Any]:
    """A JSON object, or a ValueError that says what could not be read."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read {file} as {what}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"cannot read {file} as {what}: it holds no JSON object")
    return content
