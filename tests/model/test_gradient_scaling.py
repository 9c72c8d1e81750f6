"""Losses that a gradient scaler has multiplied give the same gradients, and a step that overflows changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.model.models import VARIANTS, random_tokens, small_model
from varifocal.model import VarifocalForCausalLM


def gradients(model: VarifocalForCausalLM) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("variant", VARIANTS)
def test_scaled_gradients_are_the_plain_ones_times_the_scale(variant: str) -> None:
    tokens = random_tokens(2, 24)
    plain, scaled = (small_model(variant).train() for _ in range(2))
    optimizer = torch.optim.SGD(scaled.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    plain(tokens, labels=tokens).loss.backward()
    scaler.scale(scaled(tokens, labels=tokens).loss).backward()
    scaler.unscale_(optimizer)
    found, wanted = gradients(scaled), gradients(plain)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        # A power of two changes no digit; where gates normalize gradients, a constant added to a norm is felt.
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7, msg=f"gradient of {name}")


def test_overflowing_step_is_skipped_and_the_scale_falls() -> None:
    tokens, model = random_tokens(2, 24), small_model().train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=3e38)
    scaler.scale(1e6 * model(tokens, labels=tokens).loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == pytest.approx(1.5e38)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


NARROW = """
import torch
from tests.model.models import VARIANTS, random_tokens, small_model
torch.set_num_threads(1)
for variant in VARIANTS:
    tokens = random_tokens(2, 24)
    model = small_model(variant).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    losses = []
    for _ in range(8):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens, labels=tokens).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    assert loss.dtype == torch.float32, variant
    assert losses[-1] < losses[0], (variant, losses)
    assert scaler.get_scale() == 2.0**10, (variant, "a step was skipped")
"""


def test_autocast_with_a_scaler_learns() -> None:
    """In a process of its own: without AMX, which the machine may announce and not run."""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    root = Path(__file__).parent.parent.parent
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", NARROW], cwd=root, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-2000:]
