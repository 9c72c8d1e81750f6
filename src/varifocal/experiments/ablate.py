"""Takes mechanisms apart: a comparison whose arms are ablations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from varifocal.experiments.ablations import ablation_arms, sizes_of
from varifocal.experiments.comparison_plan import Arm, ComparisonPlan, load_plan
from varifocal.training.config import TrainingConfig


def load_ablation_plan(
    path: Path, names: Sequence[str] = (), overrides: Sequence[str] = (), *, seeds: tuple[int, ...] | None = None
) -> ComparisonPlan:
    """The plan in a TOML file, with ablations instead of its mechanisms; all ablations if none is named.

    Args:
        path: the file.
        names: names of ablations, or of mechanisms for all their ablations.
        overrides: settings of the base.
        seeds: seeds instead of the file's.
    """

    def arms(base: TrainingConfig) -> Iterable[Arm]:
        return ablation_arms(names, sizes_of(base))

    return load_plan(path, overrides, arms=arms, seeds=seeds)
