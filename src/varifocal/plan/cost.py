"""What a model costs before it is run: parameters by part, floating-point operations and cache bytes of a token."""

from __future__ import annotations

from typing import NamedTuple

import torch

from varifocal.attention.mechanisms import make_mechanism
from varifocal.attention.mechanisms.registry import config_from_options
from varifocal.attention.mechanisms.work import work
from varifocal.model.config import VarifocalConfig, reach
from varifocal.model.modeling import VarifocalForCausalLM

PARTS = {
    "embed_tokens": "embedding",
    "lm_head": "head",
    "mechanism": "mechanism",
    "self_attn": "attention",
    "mlp": "feed-forward",
}
"""A piece of a parameter's name, and the part it belongs to; the first that fits."""


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
        counts["norms" if "norm" in name else part] += parameter.numel()
    return counts


def flops_per_token(config: VarifocalConfig, length: int) -> Flops:
    """The work of an average token of a text of `length` tokens."""
    shape = config.head_shape()
    counts = parameters_by_part(config)
    # The embedding is looked up; the head multiplies, tied or not. The mechanisms' own products are counted as rating.
    weights = 2 * (counts["attention"] + counts["feed-forward"] + config.vocab_size * config.hidden_size)
    reading = rating = 0.0
    for layer in range(config.num_hidden_layers):
        one = work(config_from_options(*config.layer_mechanism(layer)), shape, length)
        reading += one.reading_flops
        rating += one.rating_flops
    return Flops(float(weights), reading, rating)


class CacheSize(NamedTuple):
    """Bytes of the decoding cache, for one sequence."""

    per_token: int
    """What each further token adds, while no layer has begun to forget."""
    at_length: int
    """All of it behind a text of the given length; layers that look back W tokens keep no more than W."""


def cache_size(config: VarifocalConfig, length: int, *, bytes_per_number: int = 4) -> CacheSize:
    """The cache of keys, values and what mechanisms remember of past keys."""
    shape = config.head_shape()
    per_token = at_length = 0
    for layer in range(config.num_hidden_layers):
        name, options = config.layer_mechanism(layer)
        numbers = 2 * shape.kv_heads * shape.head_width + remembered_numbers(config, layer)
        kept = reach(config_from_options(name, options))
        per_token += numbers * bytes_per_number
        at_length += numbers * bytes_per_number * min(length, length if kept is None else kept)
    return CacheSize(per_token, at_length)


def remembered_numbers(config: VarifocalConfig, layer: int) -> int:
    """How many numbers a layer's mechanism keeps of each past key beside k and v."""
    name, options = config.layer_mechanism(layer)
    shape = config.head_shape()
    mechanism = make_mechanism(name, shape, **options)
    with torch.no_grad():
        memory = mechanism.remember(
            torch.zeros(1, 1, shape.model_width),
            torch.zeros(1, shape.heads, 1, shape.head_width),
            torch.zeros(1, shape.kv_heads, 1, shape.head_width),
        )
    return 0 if memory is None else memory.numel()
