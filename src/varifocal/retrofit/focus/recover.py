"""Wins back what windows cost: the focused model is trained towards the dense one's hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from varifocal.model.head import logits_of
from varifocal.retrofit.adaptation import Adaptation
from varifocal.retrofit.focus.gates import LOGITS_AT_A_TIME, GatedModel

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def recover(
    model: Any,
    dense: GatedModel,
    rows: Iterable[Tensor],
    plan: Adaptation,
    *,
    lora: int | None = None,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """Train a focused model in place; returns the distance to the dense model before each step.

    Args:
        model: the focused model.
        dense: the model that it came from.
        rows: tokens [B, T], one batch for each step.
        plan: steps and rates.
        lora: the rank of adapters that are trained in place of the weights, and merged at the end.
        on_step: called with each step and its distance.
    """
    trained = model
    if lora is not None:
        trained = with_adapters(model, lora)
    trained.train()
    parameters = [one for one in trained.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=plan.rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, plan))
    losses: list[float] = []
    for number, tokens in enumerate(rows):
        with torch.no_grad(), dense.reading("everything"):
            wanted = dense.hidden(tokens).float()
        found = model.model(input_ids=tokens, use_cache=False).last_hidden_state.float()
        loss = (found - wanted).square().mean() / wanted.var()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, plan.clip)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        on_step(number + 1, losses[-1])
    if lora is not None:
        trained.merge_and_unload()
    model.requires_grad_(True).eval()
    return losses


@torch.no_grad()
def text_losses(model: Any, rows: Tensor) -> list[float]:
    """The mean loss in nats a token of each of the rows [N, T]."""
    found = []
    for row in rows:
        states = model.model(input_ids=row[None], use_cache=False).last_hidden_state[0, :-1]
        parts = [
            F.cross_entropy(logits_of(model.lm_head, some).float(), wanted, reduction="sum")
            for some, wanted in zip(states.split(LOGITS_AT_A_TIME), row[1:].split(LOGITS_AT_A_TIME), strict=True)
        ]
        found.append(float(torch.stack(parts).sum()) / (len(row) - 1))
    return found


def rate_at(step: int, plan: Adaptation) -> float:
    """A short rise, then a straight fall to a tenth."""
    return min(1.0, (step + 1) / (plan.warmup + 1)) * (1 - 0.9 * step / plan.steps)


def with_adapters(model: Any, rank: int) -> Any:
    """The model with LoRA adapters on its projections; peft merges them into it later."""
    if rank < 1:
        raise ValueError(f"the rank of adapters must be at least 1, got {rank}")
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError("adapters need peft; install it with: pip install peft") from error
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(LORA_TARGETS)))
