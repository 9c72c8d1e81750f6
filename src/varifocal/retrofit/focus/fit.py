"""Fits a share for every key head of a frozen model: how much of its output needs the whole text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from varifocal.results.files import write_whole
from varifocal.retrofit.focus.gates import GatedModel, InputGates
from varifocal.retrofit.focus.texts import FitRow

Way = Literal["distill", "constrain", "calibrate", "duo"]
WAYS: tuple[Way, ...] = ("distill", "constrain", "calibrate", "duo")
Gates = Literal["static", "input"]
GATES: tuple[Gates, ...] = ("static", "input")
TEMPERATURE, STRETCH = 2 / 3, (-0.1, 1.1)
"""Of hard-concrete gates: Louizos et al., arXiv:1712.01312."""
INPUT_RATE = 4.0


@dataclass(frozen=True, kw_only=True)
class FitPlan:
    """How gates are fitted."""

    way: Way = "distill"
    """"distill": last hidden states as near to the dense model's as the penalty allows. "constrain": hard-concrete
    gates, next-token loss, multipliers that meet the share. "calibrate": no training, the error of each head alone.
    "duo": DuoAttention's recipe, to compare with."""
    gates: Gates = "static"
    """"static": one number for each key head. "input": W x + b, from the token's own input; only for "distill"."""
    keep: float = 1 / 3
    """The share of key heads that will read everything; the fits aim at it, and "calibrate" only ranks."""
    window: int = 256
    sinks: int = 4
    steps: int = 32
    rate: float = 0.2
    """Adam's rate for the logits of the gates, which is about how far they move in a step."""
    start: float = 0.0
    """Their logit at the start; 0 is a share of 1/2."""
    penalty: float = 0.05
    """What reading everything costs in "distill": this times what the mean share is above `keep`. Below, heads are
    not pushed any further, and those around the cut go on to be told apart."""
    lengths: tuple[int, ...] = (1024, 1536)
    """Tokens of a row, drawn anew for each."""
    facts: int = 3
    """Facts in every other row; 0 for texts alone."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise ValueError(f"the way of a fit must be one of {', '.join(WAYS)}, got {self.way!r}")
        if self.gates not in GATES:
            raise ValueError(f"gates must be one of {', '.join(GATES)}, got {self.gates!r}")
        if self.gates == "input" and self.way != "distill":
            raise ValueError(f"gates by the input are fitted by distill, got {self.way}; leave --gates out")
        if self.way == "duo" and not self.facts:
            raise ValueError("DuoAttention's recipe is fitted on planted facts, got none; give --facts")
        if not 0 <= self.keep <= 1:
            raise ValueError(f"keep is a share of the key heads, from 0 to 1, got {self.keep:g}")
        for name, least in (("window", 1), ("sinks", 0), ("steps", 1), ("facts", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} of a fit must be at least {least}, got {getattr(self, name)}")
        for name in ("rate", "penalty"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} of a fit must be a finite number above 0, got {getattr(self, name)}")
        if min(self.lengths) <= self.window + self.sinks:
            raise ValueError(
                f"texts of {min(self.lengths)} tokens do not reach beyond a window of {self.window} and "
                f"{self.sinks} sinks; give a longer --length, or a smaller --window"
            )
        # From 1/2 itself a gate has to move by 1 or so to be told from the others.
        way = max(abs(self.start), 1.0)
        if self.way != "calibrate" and self.rate * self.steps < 2 * way:
            raise ValueError(
                f"gates that start at the logit {self.start:g} cannot cross 1/2 and settle: {self.steps} steps at a "
                f"rate of {self.rate:g} move them by {self.rate * self.steps:g}, and {2 * way:g} is the least; give "
                "more --steps or a higher --rate"
            )


class FitStep(NamedTuple):
    """What a step of the fit saw."""

    step: int
    loss: float
    """Without the penalty: the distance to the dense model, or the next-token loss."""
    share: float
    """The mean share of reading everything."""
    shares: Tensor
    """[layers, key heads] after the step."""


@dataclass(frozen=True, eq=False)
class Fitted:
    """What came of a fit."""

    scores: Tensor
    """[layers, key heads]: the higher, the more a head needs the whole text; shares in 0..1 but for "calibrate"."""
    traces: tuple[tuple[float, ...], ...] = ()
    """The shares after each step, layer by layer."""
    losses: tuple[float, ...] = ()


OnStep = Callable[[FitStep], None]


def fit_gates(
    gated: GatedModel,
    rows: Iterator[FitRow],
    plan: FitPlan,
    *,
    state: Path | None = None,
    of: str = "",
    on_step: OnStep = lambda step: None,
) -> Fitted:
    """Shares for all key heads, by the ways that train.

    Args:
        gated: the model; its weights stay as they are.
        rows: texts, one for each step; the same ones in the same order if a fit is resumed.
        plan: how.
        state: a file that the fit goes on from if it is there, written after each step.
        of: the model and the texts; what a fit of others left is not taken up.
        on_step: called after each step.
    """
    torch.manual_seed(plan.seed)
    size = (gated.layers, gated.kv_heads)
    logits = torch.full(size, plan.start, requires_grad=True)
    weight = torch.zeros(*size, gated.width if plan.gates == "input" else 0, requires_grad=True)
    multipliers = torch.zeros(2, requires_grad=True)
    fitted: list[dict[str, Any]] = [{"params": [logits]}]
    if plan.gates == "input":
        # A step that moves all of W one way moves W x by so many times what it moves b.
        fitted.append({"params": [weight], "lr": INPUT_RATE * plan.rate / gated.width})
    optimizer = torch.optim.Adam(fitted, lr=plan.rate, betas=(0.9, 0.95))
    # The multipliers rise with what the constraint misses.
    ascent = torch.optim.Adam([multipliers], lr=plan.rate, maximize=True)
    traces: list[tuple[float, ...]] = []
    losses: list[float] = []
    saved = read_state(state, plan, of)
    if saved is not None:
        with torch.no_grad():
            logits.copy_(torch.tensor(saved["logits"]))
            weight.copy_(torch.tensor(saved["weight"]))
            multipliers.copy_(torch.tensor(saved["multipliers"]))
        put_back(optimizer, saved["optimizer"])
        put_back(ascent, saved["ascent"])
        traces, losses = [tuple(one) for one in saved["traces"]], list(saved["losses"])
    for step in range(plan.steps):
        row = next(rows)
        noise = torch.rand(size, generator=torch.Generator().manual_seed(plan.seed * 1_000_003 + step))
        if step < len(losses):
            continue
        optimizer.zero_grad(set_to_none=True)
        ascent.zero_grad(set_to_none=True)
        if plan.way == "distill":
            loss = distance(gated, row, logits.sigmoid() if plan.gates == "static" else InputGates(weight, logits))
            now = gated.used()
            whole = loss + plan.penalty * (now.mean() - plan.keep).clamp(min=0)
        else:
            loss = next_token_loss(gated, row, hard_concrete(logits, noise))
            missed = expected_share(logits).mean() - target(plan, step)
            whole = loss + multipliers[0] * missed + multipliers[1] * missed**2
        whole.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if plan.way == "constrain":
            ascent.step()
        with torch.no_grad():
            if plan.way == "constrain":
                now = expected_share(logits)
            elif plan.gates == "static":
                now = logits.sigmoid()
            # Shares by the input are those of the step's own text, before the step.
            now = now.detach()
        traces.append(tuple(round(float(one), 5) for one in now.flatten()))
        losses.append(float(loss.detach()))
        if state is not None:
            content = {
                "plan": plain_plan(plan), "of": of, "logits": logits.tolist(),
                "weight": weight.tolist(), "multipliers": multipliers.tolist(),
                "optimizer": moments(optimizer), "ascent": moments(ascent), "traces": traces, "losses": losses,
            }  # fmt: skip
            write_whole(state, json.dumps(content) + "\n")
        on_step(FitStep(step + 1, losses[-1], float(now.mean()), now))
    if plan.gates == "input":
        # Texts differ, so the last quarter of them tells.
        last = torch.tensor(traces[-max(1, plan.steps // 4) :])
        return Fitted(last.mean(dim=0).view(size), tuple(traces), tuple(losses))
    final = logits.detach().sigmoid() if plan.way == "distill" else expected_share(logits.detach())
    return Fitted(final, tuple(traces), tuple(losses))


def distance(gated: GatedModel, row: FitRow, shares: Tensor | InputGates) -> Tensor:
    """How far the mixed model's last hidden states are from the dense model's, in units of their variance."""
    tokens = row.tokens[None]
    with torch.no_grad(), gated.reading("everything"):
        wanted = gated.hidden(tokens)[0].float()
    found = gated.hidden(tokens, shares)[0].float()
    return ((found - wanted).square().mean(dim=-1) * row.weight).sum() / wanted.var()


def next_token_loss(gated: GatedModel, row: FitRow, shares: Tensor) -> Tensor:
    """The mixed model's own loss, weighted as the row says."""
    states = gated.hidden(row.tokens[None], shares)[0]
    weight = row.weight[:-1] / row.weight[:-1].sum()
    return (gated.token_losses(row.tokens, states) * weight).sum()


def hard_concrete(logits: Tensor, noise: Tensor) -> Tensor:
    """Shares that are exactly 0 or 1 for a good part of the noise, and have a gradient between."""
    noise = noise.clamp(1e-6, 1 - 1e-6)
    soft = ((noise.log() - (-noise).log1p() + logits) / TEMPERATURE).sigmoid()
    low, high = STRETCH
    return (soft * (high - low) + low).clamp(0, 1)


def expected_share(logits: Tensor) -> Tensor:
    """The probability that a hard-concrete gate is not 0."""
    low, high = STRETCH
    return (logits - TEMPERATURE * math.log(-low / high)).sigmoid()


def target(plan: FitPlan, step: int) -> float:
    """The wanted share falls from 1 to `keep` over the first four fifths of the steps."""
    return 1 - (1 - plan.keep) * min(1.0, (step + 1) / (0.8 * plan.steps))


def plain_plan(plan: FitPlan) -> dict[str, Any]:
    """The plan as JSON gives it back."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(plan)))
    return found


def read_state(file: Path | None, plan: FitPlan, of: str) -> dict[str, Any] | None:
    """What an interrupted fit of the same plan left; None if there is none, or if it was another fit."""
    if file is None or not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return None
    same = isinstance(content, dict) and (content.get("plan"), content.get("of")) == (plain_plan(plan), of)
    return content if same else None


def moments(optimizer: torch.optim.Adam) -> list[dict[str, Any]]:
    """What Adam knows of its parameters, as plain numbers."""
    return [{key: value.tolist() for key, value in one.items()} for one in optimizer.state.values()]


def put_back(optimizer: torch.optim.Adam, saved: list[dict[str, Any]]) -> None:
    """Give Adam what `moments` took."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    for parameter, state in zip(parameters, saved, strict=False):
        optimizer.state[parameter] = {key: torch.tensor(value) for key, value in state.items()}
