"""Ablations by name: what the papers took away from their mechanisms, and what their texts leave open."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from varifocal.attention.mechanisms import MECHANISMS
from varifocal.attention.mechanisms.ablation import Ablation, AblationSizes
from varifocal.attention.mechanisms.registry import nearest
from varifocal.experiments.comparison_plan import Arm
from varifocal.training.config import TrainingConfig


def sizes_of(base: TrainingConfig) -> AblationSizes:
    """The sizes of a training config."""
    from varifocal.model.presets import PRESETS

    name, optimization = base.model.preset, base.optimization
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}{nearest(str(name), PRESETS)}; known are {', '.join(PRESETS)}")
    if optimization.total_steps is None:
        raise ValueError("ablations need a budget in steps or tokens: some of them change a share of the steps")
    return AblationSizes(
        layers=base.model.overrides.get("num_hidden_layers", PRESETS[name].layers),
        window=PRESETS[name].window,
        tokens_per_call=(optimization.micro_batch or optimization.batch) * optimization.length,
        steps=optimization.total_steps,
    )


@dataclass(frozen=True, kw_only=True)
class NamedAblation:
    """An ablation of a mechanism, or a mixture of mechanisms over the layers, as an arm of a comparison."""

    name: str
    """mechanism.change, or hybrid.kind."""
    question: str
    ablation: Ablation | None = None
    layers: Callable[[int], list[str]] | None = None
    """For a hybrid: the mechanism of each layer."""

    @property
    def family(self) -> str:
        """The mechanism that is ablated; "hybrid" for mixtures."""
        return self.name.partition(".")[0]

    def arm(self, sizes: AblationSizes) -> Arm:
        """The ablation as an arm of a comparison."""
        if self.layers is not None:
            return Arm(name=self.name, mechanism=tuple(self.layers(sizes.layers)))
        assert self.ablation is not None
        return Arm(
            name=self.name,
            mechanism=self.family,
            options=self.ablation.options(sizes),
            changes=self.ablation.changes(sizes),
            reference=self.family,
        )


def alternating(*names: str) -> Callable[[int], list[str]]:
    """The mechanisms in turn, layer by layer."""
    return lambda layers: [names[layer % len(names)] for layer in range(layers)]


def stacked(below: str, above: str) -> Callable[[int], list[str]]:
    """One mechanism in the lower half of the layers, another in the upper half."""
    return lambda layers: [below if layer < layers // 2 else above for layer in range(layers)]


def mostly(often: str, seldom: str, *, every: int) -> Callable[[int], list[str]]:
    """The second mechanism in every so many layers and in the last one, the first in all others."""
    return lambda layers: [
        seldom if layer % every == every - 1 or layer == layers - 1 else often for layer in range(layers)
    ]


HYBRIDS = (
    NamedAblation(
        name="hybrid.three_to_one",
        question="three local layers to one dense layer, the last one dense: the common hybrid",
        layers=mostly("local", "dense", every=4),
    ),
    NamedAblation(
        name="hybrid.local_dense", question="local and dense layers in turn", layers=alternating("local", "dense")
    ),
    NamedAblation(
        name="hybrid.local_below", question="local layers below, dense layers above", layers=stacked("local", "dense")
    ),
    NamedAblation(
        name="hybrid.local_gated",
        question="local and head_gated layers in turn",
        layers=alternating("local", "head_gated"),
    ),
    NamedAblation(
        name="hybrid.adaptive_above",
        question="dense layers below, context_adaptive layers above",
        layers=stacked("dense", "context_adaptive"),
    ),
)
"""Mixtures of mechanisms over the layers of one model."""


def every_ablation() -> dict[str, NamedAblation]:
    """By name: the ablations that each mechanism lists for itself, then the hybrids."""
    found = [
        NamedAblation(name=f"{name}.{one.name}", question=one.question, ablation=one)
        for name, mechanism in MECHANISMS.items()
        for one in mechanism.ablations
    ]
    return {one.name: one for one in (*found, *HYBRIDS)}


def ablation_families() -> list[str]:
    """The mechanisms that have ablations, and "hybrid"."""
    return list(dict.fromkeys(ablation.family for ablation in every_ablation().values()))


def find_ablations(names: Iterable[str]) -> list[NamedAblation]:
    """The ablations of these names. A mechanism's name stands for all its ablations; no name at all, for every one."""
    wanted = list(names) or ablation_families()
    known = every_ablation()
    selected: dict[str, NamedAblation] = {}
    for name in wanted:
        found = {key: one for key, one in known.items() if name in (key, one.family)}
        if not found:
            names_known = [*ablation_families(), *known]
            raise ValueError(
                f"unknown ablation {name!r}{nearest(name, names_known)}; 'varifocal ablate --list' shows all of them"
            )
        selected |= found
    return list(selected.values())


def ablation_arms(names: Iterable[str], sizes: AblationSizes, *, baseline: str = "dense") -> tuple[Arm, ...]:
    """The arms of an ablation: the baseline, each full mechanism, and its ablations after it."""
    selected = find_ablations(names)
    arms = {baseline: Arm(name=baseline, mechanism=baseline)}
    for ablation in selected:
        if ablation.layers is None:
            arms.setdefault(ablation.family, Arm(name=ablation.family, mechanism=ablation.family))
        arms[ablation.name] = ablation.arm(sizes)
    return tuple(arms.values())
