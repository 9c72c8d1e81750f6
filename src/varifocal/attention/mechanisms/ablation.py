"""What can be taken away from a mechanism, or changed in it, to see what it is good for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

GATE_GRADIENT = 0.01
"""Gradient normalization: the root mean square of a gate logit's gradient, times the tokens of a call. Small, so that
gates alone never reach the norm at which the whole gradient is clipped; AdamW makes up for the size."""


@dataclass(frozen=True, kw_only=True)
class AblationSizes:
    """What the options of an ablation depend on."""

    layers: int
    window: int
    """Of the mechanism that is ablated, unless its options say otherwise: the papers' 256."""
    tokens_per_call: int
    """Tokens of a micro-batch."""
    steps: int
    """Of a run."""


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """One change to a mechanism."""

    name: str
    question: str
    options: Callable[[AblationSizes], dict[str, Any]] = lambda sizes: {}
    changes: Callable[[AblationSizes], dict[str, Any]] = lambda sizes: {}
    """Changes elsewhere in the training config, from section.key to value."""


def plain(**options: Any) -> Callable[[AblationSizes], dict[str, Any]]:
    """Options that depend on no size."""
    return lambda sizes: options


GATE_TOOLS: tuple[Ablation, ...] = (
    Ablation(
        name="normalized_gradient",
        question="does normalizing the gradient of the gate logits help?",
        options=lambda sizes: {"gate": {"normalize_gradient": GATE_GRADIENT / sizes.tokens_per_call}},
    ),
    Ablation(name="z_loss", question="does a z-loss of 1e-3 help?", options=plain(gate={"z_loss": 1e-3})),
    Ablation(
        name="soft_cap", question="does a soft cap of 4 on the logits help?", options=plain(gate={"soft_cap": 4.0})
    ),
    Ablation(
        name="gate_warmup",
        question="does holding gates at their start for a tenth of the steps help?",
        changes=lambda sizes: {"optimization.gate_warmup_steps": -(-sizes.steps // 10)},
    ),
)
"""What keeps a gate trainable, one tool at a time."""
