"""Ablations by name: what the papers took away from their mechanisms, and what their texts leave in doubt."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from varifocal.attention.mechanisms.registry import nearest
from varifocal.experiments.comparison_plan import Arm
from varifocal.training.config import TrainingConfig

GATE_PULL = 0.01
"""Gradient normalization: the root mean square of a gate logit's gradient, times the tokens of a call. Small, so that
gates alone never reach the norm at which the whole gradient is clipped; AdamW makes up for the size."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the options of an ablation depend on."""

    layers: int
    window: int
    """Of the mechanism that is ablated, unless its options say otherwise: the papers' 256."""
    tokens_per_call: int
    """Tokens of a micro-batch."""
    steps: int
    """Of a run."""


def sizes_of(base: TrainingConfig) -> Sizes:
    """The sizes of a training config."""
    from varifocal.model.presets import PRESETS

    name, optimization = base.model.preset, base.optimization
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}{nearest(str(name), PRESETS)}; known are {', '.join(PRESETS)}")
    return Sizes(
        layers=base.model.overrides.get("num_hidden_layers", PRESETS[name].layers),
        window=PRESETS[name].window,
        tokens_per_call=(optimization.micro_batch or optimization.batch) * optimization.length,
        steps=optimization.total_steps,
    )


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """One change to a mechanism, or a mixture of mechanisms over the layers."""

    name: str
    """mechanism.change, or hybrid.kind."""
    question: str
    options: Callable[[Sizes], dict[str, Any]] = lambda sizes: {}
    layers: Callable[[int], list[str]] | None = None
    """For a hybrid: the mechanism of each layer."""
    changes: Callable[[Sizes], dict[str, Any]] = lambda sizes: {}
    """Changes elsewhere in the training config, from section.key to value."""

    @property
    def family(self) -> str:
        """The mechanism that is ablated; hybrid for mixtures."""
        return self.name.partition(".")[0]

    def arm(self, sizes: Sizes) -> Arm:
        """The arm of a comparison that this is."""
        mechanism = self.family if self.layers is None else tuple(self.layers(sizes.layers))
        reference = self.family if self.layers is None else None
        return Arm(
            name=self.name,
            mechanism=mechanism,
            options=self.options(sizes),
            changes=self.changes(sizes),
            reference=reference,
        )


def plain(**options: Any) -> Callable[[Sizes], dict[str, Any]]:
    """Options that depend on no size."""
    return lambda sizes: options


def alternating(*names: str) -> Callable[[int], list[str]]:
    """The mechanisms in turn, layer by layer."""
    return lambda layers: [names[layer % len(names)] for layer in range(layers)]


def stacked(below: str, above: str) -> Callable[[int], list[str]]:
    """One mechanism in the lower half of the layers, another one in the upper half."""
    return lambda layers: [below if layer < layers // 2 else above for layer in range(layers)]


def normalized(sizes: Sizes) -> dict[str, Any]:
    """Gradient normalization for the tokens of a call."""
    return {"gate": {"normalize_gradient": GATE_PULL / sizes.tokens_per_call}}


def gate_tools(mechanism: str) -> tuple[Ablation, ...]:
    """What keeps a gate trainable, one tool at a time."""
    return (
        Ablation(
            name=f"{mechanism}.normalized_gradient",
            question="does normalizing the gradient of the gate logits help?",
            options=normalized,
        ),
        Ablation(
            name=f"{mechanism}.z_loss", question="does a z-loss of 1e-3 help?", options=plain(gate={"z_loss": 1e-3})
        ),
        Ablation(
            name=f"{mechanism}.soft_cap",
            question="does a soft cap of 4 on the logits help?",
            options=plain(gate={"soft_cap": 4.0}),
        ),
        Ablation(
            name=f"{mechanism}.gate_warmup",
            question="does holding gates at their start for a tenth of the steps help?",
            changes=lambda sizes: {"optimization.gate_warmup_steps": -(-sizes.steps // 10)},
        ),
    )


ABLATIONS: dict[str, Ablation] = {
    ablation.name: ablation
    for ablation in (
        Ablation(
            name="context_adaptive.constant_gate",
            question="is it the gate, or the fixed half-and-half mix?",
            options=plain(gate={"kind": "constant"}),
        ),
        Ablation(
            name="context_adaptive.static_gate",
            question="must the gate see the token?",
            options=plain(gate={"kind": "static"}),
        ),
        Ablation(
            name="context_adaptive.linear_gate",
            question="does the gate need two layers?",
            options=plain(gate={"kind": "linear"}),
        ),
        Ablation(
            name="context_adaptive.fixed_window",
            question="must the window's width be learned?",
            options=plain(width="fixed"),
        ),
        Ablation(
            name="context_adaptive.local_only", question="what does the window do alone?", options=plain(reads="local")
        ),
        Ablation(
            name="context_adaptive.global_only", question="what do the top k do alone?", options=plain(reads="global")
        ),
        Ablation(name="context_adaptive.half_k", question="are fewer keys enough?", options=plain(k_scale=0.5)),
        Ablation(name="context_adaptive.double_k", question="do more keys help?", options=plain(k_scale=2.0)),
        Ablation(
            name="context_adaptive.blocks",
            question="what does choosing by blocks cost?",
            options=plain(select="blocks"),
        ),
        *gate_tools("context_adaptive"),
        Ablation(
            name="head_gated.no_gate",
            question="is it the gate, or the fixed half-and-half mix?",
            options=plain(gate={"kind": "constant"}),
        ),
        Ablation(
            name="head_gated.static_gate",
            question="must the gate see the token?",
            options=plain(gate={"kind": "static"}),
        ),
        Ablation(
            name="head_gated.quarter_window",
            question="a window of 64 for the paper's 256",
            options=lambda sizes: {"window": max(1, sizes.window // 4)},
        ),
        Ablation(
            name="head_gated.half_window",
            question="a window of 128 for the paper's 256",
            options=lambda sizes: {"window": max(1, sizes.window // 2)},
        ),
        Ablation(
            name="head_gated.double_window",
            question="a window of 512 for the paper's 256",
            options=lambda sizes: {"window": 2 * sizes.window},
        ),
        *gate_tools("head_gated"),
        Ablation(
            name="sparse_geometric.no_scaling",
            question="the paper's: without the learned scale",
            options=plain(scaling=False),
        ),
        Ablation(
            name="sparse_geometric.fixed_sparsity",
            question="the paper's: a fixed pattern in place of the pair network",
            options=plain(sparsity="fixed"),
        ),
        Ablation(
            name="sparse_geometric.both_off",
            question="the paper's: without both; it must equal dense",
            options=plain(sparsity="none", scaling=False),
        ),
        Ablation(
            name="sparse_geometric.additive",
            question="a closed gate that removes a pair: alpha + log s",
            options=plain(form="log"),
        ),
        Ablation(
            name="sparse_geometric.threshold",
            question="pairs whose gate is below the threshold are not read",
            options=plain(form="threshold"),
        ),
        Ablation(
            name="hybrid.local_dense", question="local and dense layers in turn", layers=alternating("local", "dense")
        ),
        Ablation(
            name="hybrid.local_below",
            question="local layers below, dense layers above",
            layers=stacked("local", "dense"),
        ),
        Ablation(
            name="hybrid.local_gated",
            question="local and head_gated layers in turn",
            layers=alternating("local", "head_gated"),
        ),
        Ablation(
            name="hybrid.adaptive_above",
            question="dense layers below, context_adaptive layers above",
            layers=stacked("dense", "context_adaptive"),
        ),
    )
}
"""By name, mechanism by mechanism."""


def ablation_families() -> list[str]:
    """The mechanisms that have ablations, and hybrid."""
    return list(dict.fromkeys(ablation.family for ablation in ABLATIONS.values()))


def chosen_ablations(names: Iterable[str]) -> list[Ablation]:
    """The ablations of these names; that of a mechanism stands for all of its ablations, none for every one."""
    wanted = list(names) or ablation_families()
    chosen: dict[str, Ablation] = {}
    for name in wanted:
        found = {key: one for key, one in ABLATIONS.items() if name in (key, one.family)}
        if not found:
            known = [*ablation_families(), *ABLATIONS]
            raise ValueError(
                f"unknown ablation {name!r}{nearest(name, known)}; 'varifocal ablate --list' shows all of them"
            )
        chosen |= found
    return list(chosen.values())


def ablation_arms(names: Iterable[str], sizes: Sizes, *, baseline: str = "dense") -> tuple[Arm, ...]:
    """The arms of an ablation: the baseline, each mechanism in full, then what was taken from it."""
    chosen = chosen_ablations(names)
    arms = {baseline: Arm(name=baseline, mechanism=baseline)}
    for ablation in chosen:
        if ablation.layers is None:
            arms.setdefault(ablation.family, Arm(name=ablation.family, mechanism=ablation.family))
        arms[ablation.name] = ablation.arm(sizes)
    return tuple(arms.values())
