"""How much one query reads of each key, in one head of one layer of a model that has read a text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from varifocal.attention.weights import AttentionWeights, attention_weights
from varifocal.explorer.reading import Reading, decoder_layer
from varifocal.model import VarifocalForCausalLM

FIRST = 4
"""Tokens at the start of a text on which heads rest; reading them is not reading far back."""


@dataclass(frozen=True, eq=False)
class AttentionRow:
    """Weights [keys] for the keys up to the query's own; `weights` sums to 1, less what a sink logit takes."""

    weights: Tensor
    """The mixture of both branches that the gate makes; without a gate, the one branch."""
    local_part: Tensor | None
    """What the first branch contributes, including the gate; None without a gate."""
    global_part: Tensor | None
    """What the second branch contributes: weights = local_part + global_part."""


@torch.no_grad()
def attention_row(model: VarifocalForCausalLM, reading: Reading, *, layer: int, head: int, token: int) -> AttentionRow:
    """The attention row of one query in one head."""
    found = weights_of_layer(model, reading, layer=layer, token=token)
    if "gate" not in reading.records[layer]:
        return AttentionRow(found.mixed[head, 0], None, None)
    # The gate comes from the reading, where it may have been held.
    gate = reading.records[layer]["gate"][head, token].float()
    near, far = (part[head, 0] for part in found.branches)
    return AttentionRow(gate * near + (1 - gate) * far, gate * near, (1 - gate) * far)


@torch.no_grad()
def far_shares(model: VarifocalForCausalLM, reading: Reading, *, layer: int, token: int, near: int) -> Tensor:
    """[heads]: the share of its weights that a query gives to keys `near` or more back, but for the first ones."""
    found = weights_of_layer(model, reading, layer=layer, token=token)
    far = max(0, token + 1 - near)
    if "gate" not in reading.records[layer]:
        return found.mixed[:, 0, FIRST:far].sum(dim=-1)
    gate = reading.records[layer]["gate"][:, token].float()
    ours, theirs = (part[:, 0, FIRST:far].sum(dim=-1) for part in found.branches)
    return gate * ours + (1 - gate) * theirs


def weights_of_layer(model: VarifocalForCausalLM, reading: Reading, *, layer: int, token: int) -> AttentionWeights:
    """What one query reads in all heads of a layer."""
    block = decoder_layer(model, layer)
    attention = block.self_attn
    hidden = reading.inputs[layer][None, : token + 1]
    x = block.input_layernorm(hidden)
    rotary = model.model.rotary_emb(hidden, torch.arange(token + 1, device=hidden.device)[None])
    q, k = attention.queries_and_keys(x, rotary)
    return attention_weights(attention.mechanism, x, q, k, last=1)
