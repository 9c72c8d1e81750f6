"""Small language models with every mechanism: how they start, learn, decode and generate."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tests.golden.fingerprints import Compute
from tests.golden.mechanisms import normal
from varifocal.model import VarifocalForCausalLM, preset

VOCABULARY = 256
LENGTH = 96
PROMPT = 40
NEW = 24
STEPS = 10
CHUNKS = [40, 17, 7, *[1] * 32]
"""How the tokens of a text arrive: a prompt, two more pieces, then one by one."""
PADDING = 11
"""Tokens by which the shorter of two prompts is padded."""
BATCHES = 5
PROMPTS = 22
"""Of the many texts that could be drawn, two sets in which no decision is a close one: neither which token follows the
prompts, nor which keys a top-k selects while the batches train it. Every processor then decides alike."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}

WINDOWS: dict[str, Any] = {"window_min": 8, "window_max": 24, "edge": 4, "gate": {"hidden": 8}}

VARIANTS: dict[str, tuple[str | list[str], dict[str, Any]]] = {
    "dense": ("dense", {}),
    "local": ("local", {"window": 14, "sinks": 2}),
    "local window": ("local", {"window": 14, "sinks": 0}),
    "combiner": ("combiner", {"segment": 10}),
    "dynamic_sparse": ("dynamic_sparse", {"rank": 4, "k_min": 3}),
    "dynamic_sparse blocks": ("dynamic_sparse", {"rank": 4, "select": "blocks", "block": 4, "k_scale": 2.0}),
    "context_adaptive": ("context_adaptive", WINDOWS),
    "context_adaptive blocks": ("context_adaptive", {**WINDOWS, "select": "blocks", "block": 4, "k_scale": 2.0}),
    "context_adaptive window": ("context_adaptive", {**WINDOWS, "reads": "local"}),
    "head_gated": ("head_gated", {"window": 12}),
    "sparse_geometric": ("sparse_geometric", {"hidden": 4}),
    "bigbird": ("bigbird", {"window": 8, "global_tokens": 3, "random_blocks": 2, "block": 6}),
    "sparse_transformer": ("sparse_transformer", {"stride": 10}),
    "focused": ("focused", {"windows": (None, 12), "sinks": 2}),
    "hybrid": (["local", "head_gated"], {"local": {"window": 14, "sinks": 0}, "head_gated": {"window": 12}}),
}
"""By name: the mechanism of all layers or of each, and its options."""


def made_model(variant: str) -> VarifocalForCausalLM:
    """A model as it starts."""
    mechanism, options = VARIANTS[variant]
    torch.manual_seed(0)
    return VarifocalForCausalLM(preset("tiny", mechanism=mechanism, mechanism_options=options, **SIZES))


def drawn_model(variant: str, *, jitter: float = 0.0) -> VarifocalForCausalLM:
    """A model whose parameters follow from their names, large enough for logits of some size.

    Args:
        variant: one of VARIANTS.
        jitter: how far each number is moved, relative to itself: what a rounding elsewhere would do.
    """
    model = made_model(variant)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = normal(name, *parameter.shape)
            if "mechanism" in name:
                drawn = drawn * 0.5
            elif parameter.ndim == 1:
                drawn = 1 + 0.1 * drawn
            else:
                drawn = drawn * 0.3
            parameter.copy_(drawn * (1 + jitter * normal(f"jitter {name}", *parameter.shape)))
    model.eval()
    return model


def random_tokens(name: str, *shape: int) -> Tensor:
    """Token ids that follow from a name."""
    return (normal(name, *shape) * 1e6).long() % VOCABULARY


def start(variant: str, *, jitter: float = 0.0) -> dict[str, Tensor]:
    """Every parameter at the start."""
    return {name: parameter.detach() for name, parameter in made_model(variant).named_parameters()}


def training(variant: str, *, jitter: float = 0.0) -> dict[str, Tensor]:
    """The losses of ten steps over two batches, and the first step's gradients."""
    model = drawn_model(variant, jitter=jitter)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, first = [], {}
    for step in range(STEPS):
        batch = random_tokens(f"batch {BATCHES} {step % 2}", 2, LENGTH)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        if not step:
            first = {
                f"gradient of {name}": torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
                for name, parameter in model.named_parameters()
            }
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), **first}


def decoding(variant: str, *, jitter: float = 0.0) -> dict[str, Tensor]:
    """The logits of one pass over a text, and of the same text in pieces with a cache."""
    model, tokens = drawn_model(variant, jitter=jitter), random_tokens("text", 2, LENGTH)
    pieces, cache = [], None
    with torch.no_grad():
        whole = model(input_ids=tokens, use_cache=False).logits
        for piece in torch.split(tokens, CHUNKS, dim=1):
            step = model(input_ids=piece, past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            pieces.append(step.logits)
    return {
        "whole": whole,
        "prefill": pieces[0],
        "chunks": torch.cat(pieces[1:3], 1),
        "steps": torch.cat(pieces[3:], 1),
    }


def prompts() -> tuple[Tensor, Tensor]:
    """Two prompts of different lengths, the shorter one padded on its left; and their mask."""
    tokens = random_tokens(f"prompts {PROMPTS}", 2, PROMPT)
    mask = torch.ones_like(tokens)
    mask[0, :PADDING] = 0
    return tokens, mask


def generated(variant: str, jitter: float, tokens: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """The new tokens of `generate`, which takes the best."""
    model = drawn_model(variant, jitter=jitter)
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
    found: Tensor = model.generate(tokens, attention_mask=mask, **options)
    return found[:, tokens.shape[1] :]


def greedy(variant: str, *, jitter: float = 0.0) -> dict[str, Tensor]:
    """The tokens that follow one prompt."""
    prompt = random_tokens(f"prompt {PROMPTS}", 1, PROMPT)
    return {"tokens": generated(variant, jitter, prompt, torch.ones_like(prompt))}


def left_padded(variant: str, *, jitter: float = 0.0) -> dict[str, Tensor]:
    """The tokens that follow two prompts of different lengths, and the prompts' logits."""
    tokens, mask = prompts()
    with torch.no_grad():
        logits = drawn_model(variant, jitter=jitter)(input_ids=tokens, attention_mask=mask).logits
    return {
        "tokens": generated(variant, jitter, tokens, mask),
        "padded logits": logits[0, PADDING:],
        "full logits": logits[1],
    }


def beams(variant: str, *, jitter: float = 0.0) -> dict[str, Tensor]:
    """The tokens of the better of two beams."""
    return {"tokens": generated(variant, jitter, *prompts(), num_beams=2)}


def smallest_margin(variant: str) -> float:
    """The smallest lead of the best logit over the second best in what `greedy` and `left_padded` decide."""
    single = random_tokens(f"prompt {PROMPTS}", 1, PROMPT)
    leads = []
    for tokens, mask in ((single, torch.ones_like(single)), prompts()):
        model = drawn_model(variant)
        found = model.generate(
            tokens, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        best = torch.stack(found.logits).topk(2, dim=-1).values
        leads.append(float((best[..., 0] - best[..., 1]).min()))
    return min(leads)


KINDS = (start, training, decoding, greedy, left_padded, beams)


def computations(*, jitter: float = 0.0) -> dict[str, Compute]:
    """By name, for every kind and variant."""
    return {
        f"model/{kind.__name__}/{variant}": functools.partial(kind, variant, jitter=jitter)
        for kind in KINDS
        for variant in VARIANTS
    }
