"""The plan of a comparison: one training config, the arms that differ from it, and the seeds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from varifocal.attention.mechanisms.registry import mechanism_type, nearest
from varifocal.results.comparison import PlanRecord, cell_name
from varifocal.results.environment import Environment
from varifocal.training.config import DataSection, TrainingConfig, config_from
from varifocal.training.settings import read_config_file

VARIED = {
    "model.mechanism": "mechanisms",
    "model.mechanism_options": "mechanisms",
    "run.seed": "seeds",
}
"""The settings that a comparison varies, so that its base must not fix them, and the key that gives them instead."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One row of the tables: a mechanism with its options."""

    name: str
    mechanism: str | tuple[str, ...]
    """One mechanism for all layers, or one for each layer."""
    options: dict[str, Any] | list[dict[str, Any]] = field(default_factory=dict)
    """Options that override those that the preset scales to its context."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Changes elsewhere in the training config, from section.key to value."""
    reference: str | None = None
    """The arm of which this one is an ablation."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w][\w.+-]*", self.name):
            raise ValueError(f"an arm's name names a folder: use letters, digits, . _ + and -, got {self.name!r}")
        for name in (self.mechanism,) if isinstance(self.mechanism, str) else self.mechanism:
            mechanism_type(name)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a comparison."""

    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        """The name of its run directory."""
        return cell_name(self.arm.name, self.seed)


@dataclass(frozen=True, kw_only=True)
class ComparisonPlan:
    """Every arm runs with every seed, on the same data in the same order and with the same budget."""

    title: str
    base: TrainingConfig
    """What all cells share."""
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...] = (0,)
    baseline: str = "dense"
    """The arm that the others are compared with."""
    test_tokens: int | None = None
    """Tokens of the test split for the loss at the end; None for all."""
    smallest_effect: float | None = None
    """The smallest difference in nats a token that is of interest; what cannot tell it says so before it runs."""

    def __post_init__(self) -> None:
        if self.base.model.start is not None:
            raise ValueError("a comparison trains every mechanism from scratch; remove model.start from its base")
        if not self.arms:
            raise ValueError("a comparison needs at least one mechanism, got none")
        names = [arm.name for arm in self.arms]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two arms are named {name!r}; give one of them another 'name'")
        if self.baseline not in names:
            raise ValueError(f"the baseline {self.baseline!r} is not among the arms {', '.join(names)}; add it to them")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"seeds must be different whole numbers of at least 0, got {list(self.seeds)}")
        if self.test_tokens is not None and self.test_tokens < 1:
            raise ValueError(f"test_tokens must be at least 1, got {self.test_tokens}")
        if self.smallest_effect is not None and self.smallest_effect <= 0:
            raise ValueError(f"smallest_effect must be above 0 nats a token, got {self.smallest_effect}")
        for cell in self.cells():
            self.config(cell)

    def cells(self) -> list[Cell]:
        """All cells, seed by seed, so that a comparison that is cut short has all arms of its first seeds."""
        return [Cell(arm=arm, seed=seed) for seed in self.seeds for arm in self.arms]

    def config(self, cell: Cell, *, data: Path | None = None) -> TrainingConfig:
        """The training config of one cell; `data` is where the base's source was prepared."""
        arm = cell.arm
        sections: dict[str, Any] = {}
        for key, value in arm.changes.items():
            section, _, name = key.partition(".")
            try:
                sections[section] = replace(sections.get(section, getattr(self.base, section)), **{name: value})
            except (AttributeError, TypeError) as error:
                raise ValueError(f"arm {arm.name!r} changes {key!r}, which no training config has") from error
        mechanism = arm.mechanism if isinstance(arm.mechanism, str) else list(arm.mechanism)
        model = sections.get("model", self.base.model)
        sections["model"] = replace(model, mechanism=mechanism, mechanism_options=arm.options)
        sections["run"] = replace(sections.get("run", self.base.run), seed=cell.seed)
        if data is not None:
            sections["data"] = DataSection(path=str(data), joined=self.base.data.joined)
        return replace(self.base, **sections)

    @property
    def data_name(self) -> str:
        """The name of the data in tables."""
        return Path(str(self.base.data.source or self.base.data.path)).name

    def record(self, *, workers: int, environment: Environment) -> PlanRecord:
        """The plan as plan.json holds it."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        shared = {"data": self.data_name, "workers": workers, "environment": environment.to_json()}
        return PlanRecord.from_json(plain | shared)


def load_plan(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    arms: Callable[[TrainingConfig], Iterable[Arm]] | None = None,
    seeds: tuple[int, ...] | None = None,
) -> ComparisonPlan:
    """The plan in a TOML file, with overrides `section.key=value` of its base.

    Raises a ValueError of one sentence for anything unknown, of the wrong type, or contradictory.

    Args:
        path: the file.
        overrides: settings of the base.
        arms: makes the arms from the base, instead of the file's mechanisms.
        seeds: seeds instead of the file's.
    """
    content = read_config_file(path)
    known = ("title", "mechanisms", "seeds", "baseline", "test_tokens", "smallest_effect", "base")
    for key in content:
        if key not in known:
            raise ValueError(f"{path} has the unknown key {key!r}{nearest(key, known)}; known are {', '.join(known)}")
    base = read_base(path, content.get("base"), overrides)
    if arms is None and not isinstance(content.get("mechanisms"), list):
        raise ValueError(
            f"{path} must list the mechanisms to compare, for example mechanisms = ['dense', 'head_gated'], got "
            f"{content.get('mechanisms')!r}"
        )
    given = content.get("seeds", [0]) if seeds is None else list(seeds)
    if not isinstance(given, list) or not all(type(seed) is int for seed in given):
        raise ValueError(f"{path}: seeds must be a list of whole numbers, got {given!r}")
    test_tokens = content.get("test_tokens")
    if test_tokens is not None and type(test_tokens) is not int:
        raise ValueError(f"{path}: test_tokens must be a whole number, got {test_tokens!r}")
    effect = content.get("smallest_effect")
    if effect is not None and type(effect) not in (int, float):
        raise ValueError(f"{path}: smallest_effect must be a number of nats a token, got {effect!r}")
    return ComparisonPlan(
        title=str(content.get("title", path.stem)),
        base=base,
        arms=tuple(arms(base) if arms is not None else map(arm_from, content["mechanisms"])),
        seeds=tuple(given),
        baseline=str(content.get("baseline", "dense")),
        test_tokens=test_tokens,
        smallest_effect=None if effect is None else float(effect),
    )


def read_base(path: Path, content: Any, overrides: Sequence[str]) -> TrainingConfig:
    """The training config that all cells share; ValueError if it fixes what a comparison varies."""
    if not isinstance(content, Mapping):
        raise ValueError(
            f"{path} has no training config that the mechanisms share; put its sections under base: [base.data], "
            "[base.model], [base.optimization]"
        )
    fixed = {f"{section}.{key}" for section, values in content.items() if isinstance(values, Mapping) for key in values}
    fixed |= {override.partition("=")[0].strip() for override in overrides}
    for key, instead in VARIED.items():
        if any(one == key or one.startswith(f"{key}.") for one in fixed):
            raise ValueError(f"{path}: {key} is what a comparison varies; leave it out of the base and use {instead!r}")
    return config_from(content, overrides, where=f"base of {path}")


def arm_from(given: Any) -> Arm:
    """An arm as the list `mechanisms` gives it: a name, or a table."""
    if isinstance(given, str):
        return Arm(name=given, mechanism=given)
    if not isinstance(given, Mapping):
        raise ValueError(f"a mechanism is a name or a table with 'mechanism' and 'options', got {given!r}")
    known = [one.name for one in fields(Arm)]
    for key in given:
        if key not in known:
            raise ValueError(f"a mechanism has no key {key!r}{nearest(key, known)}; known are {', '.join(known)}")
    mechanism = given.get("mechanism", given.get("name"))
    if isinstance(mechanism, list):
        mechanism = tuple(mechanism)
    if not isinstance(mechanism, str | tuple) or not all(isinstance(one, str) for one in mechanism):
        raise ValueError(f"the mechanism of an arm is a name or a list of names, got {mechanism!r}")
    name = given.get("name", mechanism)
    if not isinstance(name, str):
        raise ValueError(f"an arm with a mechanism for each layer needs a 'name', got {name!r}")
    return Arm(**{**given, "name": name, "mechanism": mechanism})
