"""Small random models that are served, and what they say by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from varifocal.model import VarifocalConfig, VarifocalForCausalLM

WINDOW, VOCABULARY = 64, 512

MAPS = ([None, WINDOW, WINDOW, WINDOW], [WINDOW, None, WINDOW, WINDOW], [None, WINDOW, WINDOW, None])
"""What the key heads of three layers read."""


def focused(**options: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """A head map of three layers."""
    return ["focused"] * len(MAPS), [{"windows": windows, **options} for windows in MAPS]


MODELS: dict[str, tuple[Any, Any]] = {
    "dense": ("dense", {}),
    "local": ("local", {"window": WINDOW, "sinks": 4}),
    "local with a sink logit": ("local", {"window": WINDOW, "sinks": 0, "sink_logit": True}),
    "head_gated": ("head_gated", {"window": WINDOW}),
    "focused": focused(sinks=4),
    "focused with both sinks": focused(sinks=4, sink_logit=True),
    "focused with a sink logit": focused(sinks=0, sink_logit=True),
}


def save(folder: Path, mechanism: Any, options: Any, **given: Any) -> Path:
    """A random model whose mechanisms decide something."""
    torch.manual_seed(0)
    config = VarifocalConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=len(MAPS),
        num_attention_heads=8, num_key_value_heads=4, head_dim=32, max_position_embeddings=8192,
        initializer_range=0.1, mechanism=mechanism, mechanism_options=options, bos_token_id=None, eos_token_id=None,
        **given,
    )  # fmt: skip
    model = VarifocalForCausalLM(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if ".mechanism." in name:
                value.normal_(std=0.5)
    model.save_pretrained(folder)
    return folder


def prompts(lengths: list[int], *, seed: int = 0) -> list[list[int]]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def log_probabilities(model: VarifocalForCausalLM, prompt: list[int], tokens: list[int]) -> Tensor:
    """What our model gives each next token after the prompt, [T, V]."""
    logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
    found: Tensor = logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
    return found
