"""A cache as if a text had been read: filled with random keys and values, which cost no prefill."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from varifocal.attention.mechanisms import Mechanism
from varifocal.kernels.native.backend import as_mixture
from varifocal.kernels.native.mixture import per_head
from varifocal.model import VarifocalForCausalLM
from varifocal.model.layout import lay_out_text
from varifocal.model.memory_layer import remember, standing_of


def random_cache(model: PreTrainedModel, *, texts: int, context: int, room: int | None = None) -> Cache:
    """A cache of `context` tokens of random keys and values for each text.

    Args:
        model: ours, or one of transformers'.
        texts: rows of the batch.
        context: tokens of each.
        room: for how many tokens a static cache has room; None for one that grows.
    """
    config: Any = model.config
    cache = DynamicCache(config=config) if room is None else StaticCache(config=config, max_cache_len=room)
    generator = torch.Generator().manual_seed(context)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def draw(*sizes: int) -> Tensor:
        return torch.randn(texts, *sizes, generator=generator)

    for layer in range(config.num_hidden_layers):
        k, v = (draw(config.num_key_value_heads, context, width) for _ in range(2))
        if not isinstance(model, VarifocalForCausalLM):
            cache.update(k, v, layer)
            continue
        held: Any = model.model.layers[layer]
        layout = lay_out_text(texts, context, standing=standing_of(None), device=torch.device("cpu"))[0]
        x, q = draw(context, config.hidden_size), draw(config.num_attention_heads, context, width)
        remember(cache, layer, held.self_attn.mechanism, x, q, k, v, layout=layout)
    return cache


def cache_bytes(model: PreTrainedModel, cache: Cache) -> int:
    """The bytes of the keys and values that a token reads: all that are kept, or those of the mechanism's windows."""
    total = 0
    for number, layer in enumerate(cache.layers):
        keys, values = layer.keys, layer.values
        if keys is None or values is None:
            continue
        whole = keys.numel() * keys.element_size() + values.numel() * values.element_size()
        kept, share = keys.shape[2], 1.0
        if isinstance(model, VarifocalForCausalLM):
            held: Any = model.model.layers[number]
            share = share_read(held.self_attn.mechanism, kept)
        total += round(whole * share)
    return total


def share_read(mechanism: Mechanism[Any], kept: int) -> float:
    """Which share of the kept keys a query reads, over all key heads; 1 where the mechanism does not say beforehand."""
    step = mechanism.step()
    branches = [as_mixture(branch) for branch in step.branches] if step is not None else [None]
    shape, sizes = mechanism.shape, []
    for branch in branches:
        if branch is None or branch.width is not None:
            return 1.0
        sizes.append(sum(per_head([one], shape.heads, "size")[0].long() for one in (branch.window, branch.prefix)))
    # The heads that share a key head read its longest stretch, in whichever branch.
    widest = torch.stack([torch.as_tensor(one) for one in sizes]).amax(dim=0).view(shape.kv_heads, -1).amax(dim=1)
    return float(widest.clamp(max=kept).sum()) / max(1, kept * shape.kv_heads)
