"""DuoAttention's recipe (arXiv:2410.10819), written from its description: a rival to compare fits with.

Each key head has a number alpha from 1, kept within 0 and 1. A head's output is alpha times the dense model's own
output in that layer, which takes no gradient, plus 1 - alpha times that of windows. What is made small is the mean
square of the last hidden states' difference on questions and answers, plus 0.05 times the mean of alpha. Here with this
package's facts, windows and number of tokens; the rate of Adam is the plan's, and rises and falls over a fifth of the
steps at both ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from varifocal.attention.mechanisms import MechanismOutput
from varifocal.retrofit.focus.fit import FitPlan, FitStep, Fitted
from varifocal.retrofit.focus.gates import FocusGates, GatedModel
from varifocal.retrofit.focus.texts import FitRow

RAMP = 0.2
PENALTY = 0.05


def fit_duo(
    gated: GatedModel, rows: Iterator[FitRow], plan: FitPlan, *, on_step: Callable[[FitStep], None] = lambda step: None
) -> Fitted:
    """alpha of all key heads after the plan's steps, one text in each; see the top of this file."""
    alpha = torch.ones(gated.layers, gated.kv_heads, requires_grad=True)
    optimizer = torch.optim.AdamW([alpha], lr=plan.rate, weight_decay=0.0)
    ramp = max(1.0, RAMP * plan.steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / ramp, (plan.steps - step) / ramp)
    )
    losses: list[float] = []
    traces: list[tuple[float, ...]] = []
    for step in range(plan.steps):
        row = next(rows)
        loss = duo_distance(gated, row, alpha)
        optimizer.zero_grad(set_to_none=True)
        (loss + PENALTY * alpha.abs().mean()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            alpha.clamp_(0, 1)
        losses.append(float(loss.detach()))
        traces.append(tuple(round(float(one), 5) for one in alpha.detach().flatten()))
        on_step(FitStep(step + 1, losses[-1], float(alpha.detach().mean()), alpha.detach().clone()))
    return Fitted(alpha.detach(), tuple(traces), tuple(losses))


def duo_distance(gated: GatedModel, row: FitRow, alpha: Tensor) -> Tensor:
    """The mean square of the difference on the tokens that count."""
    tokens, outputs = row.tokens[None], dict[int, Tensor]()

    def keep(layer: int, answer: MechanismOutput) -> MechanismOutput:
        outputs[layer] = answer.output
        return answer

    def mix(layer: int, answer: MechanismOutput) -> MechanismOutput:
        each = answer.output.shape[1] // gated.kv_heads
        share = alpha[layer].repeat_interleave(each)[None, :, None, None]
        return replace(answer, output=share * outputs[layer] + (1 - share) * answer.output)

    with torch.no_grad(), gated.reading("everything"), answering(gated, keep):
        wanted = gated.hidden(tokens)[0].float()
    windows = ((False,) * gated.kv_heads,) * gated.layers
    with gated.by_map(windows), answering(gated, mix):
        found = gated.hidden(tokens)[0].float()
    return ((found - wanted).square().mean(dim=-1) * row.weight).sum()


@contextmanager
def answering(gated: GatedModel, change: Callable[[int, MechanismOutput], MechanismOutput]) -> Iterator[None]:
    """Inside the block every layer's attention gives what `change` makes of it."""

    def hook(layer: int) -> Callable[[FocusGates, Any, MechanismOutput], MechanismOutput]:
        return lambda mechanism, given, answer: change(layer, answer)

    hooks = [gate.register_forward_hook(hook(layer)) for layer, gate in enumerate(gated.gates)]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()
