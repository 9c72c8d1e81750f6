"""How much one query reads of each key, in one head of one layer of a model that has read a text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from varifocal.attention.weights import attention_weights
from varifocal.explorer.reading import Reading, decoder_layer
from varifocal.model import VarifocalForCausalLM


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
    block = decoder_layer(model, layer)
    attention = block.self_attn
    hidden = reading.inputs[layer][None, : token + 1]
    x = block.input_layernorm(hidden)
    rotary = model.model.rotary_emb(hidden, torch.arange(token + 1, device=hidden.device)[None])
    q, k = attention.queries_and_keys(x, rotary)
    found = attention_weights(attention.mechanism, x, q, k, last=1)
    if "gate" not in reading.records[layer]:
        return AttentionRow(found.mixed[head, 0], None, None)
    # The gate comes from the reading, where it may have been held.
    gate = reading.records[layer]["gate"][head, token].float()
    near, far = (part[head, 0] for part in found.branches)
    return AttentionRow(gate * near + (1 - gate) * far, gate * near, (1 - gate) * far)
