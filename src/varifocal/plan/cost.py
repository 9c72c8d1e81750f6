"""What a model costs, before it is run: parameters by part, floating-point operations and cache bytes per token."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from varifocal.attention.mechanisms import Mechanism, make_mechanism
from varifocal.model.config import VarifocalConfig
from varifocal.model.modeling import VarifocalForCausalLM
from varifocal.plan.work import work

PARTS = {
    ".mechanism.": "mechanism",
    "embed_tokens": "embedding",
    "lm_head": "head",
    "self_attn": "attention",
    "mlp": "feed-forward",
}
"""A piece of a parameter's name, and the part that the parameter belongs to; the first match counts."""


class Flops(NamedTuple):
    """Floating-point operations of a forward pass for an average token; a training step takes three times as many."""

    weights: float
    """Matrix products with the model's weights."""
    reading: float
    """Attention to the keys that are read."""
    rating: float
    """What decides which keys are read and how much they count."""

    @property
    def total(self) -> float:
        return sum(self)


def parameters_by_part(config: VarifocalConfig) -> dict[str, int]:
    """Parameters of embedding, attention, mechanism, feed-forward, norms and head; a tied head has none of its own."""
    with torch.device("meta"):
        model = VarifocalForCausalLM(config)
    counts = dict.fromkeys(("embedding", "attention", "mechanism", "feed-forward", "norms", "head"), 0)
    for name, parameter in model.named_parameters():
        part = next((part for piece, part in PARTS.items() if piece in name), "norms")
        # A mechanism may have norms of its own.
        counts["norms" if "norm" in name and part != "mechanism" else part] += parameter.numel()
    return counts


def flops_per_token(config: VarifocalConfig, length: int) -> Flops:
    """The work of an average token of a text of `length` tokens."""
    counts = parameters_by_part(config)
    # The embedding is looked up; the head multiplies, tied or not. The mechanisms' own products are counted as rating.
    weights = 2 * (counts["attention"] + counts["feed-forward"] + config.vocab_size * config.hidden_size)
    reading = rating = 0.0
    for mechanism in layer_mechanisms(config):
        one = work(mechanism, length)
        reading += one.reading_flops
        rating += one.rating_flops
    return Flops(float(weights), reading, rating)


class CacheSize(NamedTuple):
    """Bytes of the decoding cache, for one sequence."""

    per_token: int
    """What each further token adds, as long as no layer has begun to forget."""
    at_length: int
    """The whole cache after a text of the given length; layers that look back W tokens keep no more than W."""


def cache_size(config: VarifocalConfig, length: int, *, bytes_per_number: int = 4) -> CacheSize:
    """The cache of keys, values and what mechanisms note of past keys."""
    per_token = at_length = 0
    for mechanism in layer_mechanisms(config):
        size, kept = remembered_bytes(mechanism, bytes_per_number), mechanism.memory().kept(length)
        per_token += size
        at_length += round(size * kept)
    return CacheSize(per_token, at_length)


def remembered_bytes(mechanism: Mechanism[Any], bytes_per_number: int) -> int:
    """What a layer keeps for each past token, counted in its memory after one token."""
    shape = mechanism.shape
    key = torch.zeros(1, shape.kv_heads, 1, shape.head_width)
    query = torch.zeros(1, shape.heads, 1, shape.head_width)
    with torch.no_grad():
        kept = mechanism.memory().append(torch.zeros(1, 1, shape.model_width), query, key, key)
    entries = (kept.k, kept.v, *kept.notes.values())
    # Integers, which name things, keep their size whatever the model's numbers are.
    return sum(one.numel() * bytes_per_number if one.is_floating_point() else one.nbytes for one in entries)


def layer_mechanisms(config: VarifocalConfig) -> list[Mechanism[Any]]:
    """The mechanism of each layer; layers with equal options share one, which is enough for counting."""
    found: dict[str, Mechanism[Any]] = {}
    layers = []
    for layer in range(config.num_hidden_layers):
        name, options = config.layer_mechanism(layer)
        key = f"{name} {sorted(options.items())}"
        if key not in found:
            found[key] = make_mechanism(name, config.head_shape(), **options)
        layers.append(found[key])
    return layers
