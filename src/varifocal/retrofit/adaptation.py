"""A trained model on a plain text: its loss, how far another model is from it, and a short adaptation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from varifocal.model.modeling import VarifocalForCausalLM

TOKENS_AT_A_TIME = 256
"""Bounds the number of logits that exist at once."""


def read_rows(file: Path, tokenizer: Any, *, length: int, most: int | None = None) -> Tensor:
    """The tokens [N, length] of a text file, cut into rows; an incomplete row at the end is left out.

    Args:
        file: a text in UTF-8.
        tokenizer: a tokenizer of transformers.
        length: tokens per row.
        most: the most rows to read, from the start of the file; None for all.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {file} as a text in UTF-8: {error}") from error
    if most is not None:
        # A few rows do not need the whole book tokenized; tokens are shorter than 40 characters on average.
        text = text[: most * length * 40]
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    rows = len(tokens) // length if most is None else min(most, len(tokens) // length)
    if rows < 1:
        raise ValueError(
            f"{file} has {len(tokens)} tokens, fewer than a row of {length}; give a longer text or a shorter context"
        )
    return torch.tensor(tokens[: rows * length]).view(rows, length)


@dataclass(frozen=True)
class Distance:
    """How far apart two models are on the same rows of text."""

    first_loss: float
    """Both losses are in nats a token."""
    second_loss: float
    largest_logit_difference: float


@torch.no_grad()
def measure_distance(first: PreTrainedModel, second: PreTrainedModel, rows: Tensor) -> Distance:
    """The losses of two models on tokens [N, T], and the largest difference between any of their logits."""
    losses, largest, count = [0.0, 0.0], 0.0, 0
    for row in rows:
        hidden = [model.model(input_ids=row[None], use_cache=False).last_hidden_state[0] for model in (first, second)]
        for begin in range(0, len(row), TOKENS_AT_A_TIME):
            part = slice(begin, begin + TOKENS_AT_A_TIME)
            logits = [model.lm_head(h[part]).float() for model, h in zip((first, second), hidden, strict=True)]
            largest = max(largest, float((logits[0] - logits[1]).abs().max()))
            targets = row[1:][part]
            count += len(targets)
            for which, one in enumerate(logits):
                losses[which] += float(F.cross_entropy(one[: len(targets)], targets, reduction="sum"))
    return Distance(losses[0] / count, losses[1] / count, largest)


@torch.no_grad()
def mean_loss(model: VarifocalForCausalLM, rows: Tensor) -> float:
    """The loss in nats a token on tokens [N, T], without auxiliary losses."""
    training = model.training
    model.eval()
    losses = [model(input_ids=row[None], labels=row[None], use_cache=False).cross_entropy for row in rows]
    model.train(training)
    return float(torch.stack(losses).mean())


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """A short training run with AdamW at a constant rate, without weight decay."""

    steps: int
    batch: int = 1
    """Rows per step, taken from the text in order; after its end they start over."""
    rate: float = 1e-4
    mechanism_rate: float = 1e-3
    """The rate of the mechanism parameters, which are not pretrained."""
    warmup: int = 3
    """Steps over which both rates rise to their values."""
    clip: float = 1.0
    """The largest gradient norm of all parameters but the mechanisms' own; those are left to Adam's scaling."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of an adaptation must be at least 1, got {getattr(self, name)}")
        for name in ("rate", "mechanism_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} of an adaptation must be above 0, got {getattr(self, name)}")


def adapt(
    model: VarifocalForCausalLM,
    rows: Tensor,
    plan: Adaptation,
    *,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """Train a model in place on tokens [N, T]; returns the loss before each step, without auxiliary losses."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    own = [parameter for name, parameter in named if ".mechanism." in name]
    others = [parameter for name, parameter in named if ".mechanism." not in name]
    groups = [
        {"params": others, "lr": plan.rate},
        # A closed gate's gradient is far below Adam's usual epsilon, which would keep it from moving.
        {"params": own, "lr": plan.mechanism_rate, "eps": 1e-20},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (plan.warmup + 1)))
    losses: list[float] = []
    model.train()
    for step in range(plan.steps):
        numbers = torch.arange(step * plan.batch, (step + 1) * plan.batch) % len(rows)
        tokens = rows[numbers]
        output = model(input_ids=tokens, labels=tokens, use_cache=False)
        optimizer.zero_grad(set_to_none=True)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(others, plan.clip)
        optimizer.step()
        schedule.step()
        losses.append(float(output.cross_entropy))
        on_step(step + 1, losses[-1])
    model.eval()
    return losses
