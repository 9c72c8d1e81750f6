"""How much of each key one query reads: a single row of a matrix that never exists as a whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from varifocal.attention.forced_gates import force_gates, gates_of
from varifocal.explorer.reading import Reading, decoder_layer
from varifocal.model import VarifocalForCausalLM

MOST_ROWS, MOST_NUMBERS = 16, 2**22
"""How many unit vectors are read at once: few calls for a short text, little memory for a long one."""


@dataclass(frozen=True, eq=False)
class AttentionRow:
    """The weights [keys] of the keys up to the query's own; each row sums to 1."""

    weights: Tensor
    """Of the mix that the gate makes of both branches; of the one branch where there is no gate."""
    local_part: Tensor | None
    """What the first branch contributes, gate included; None without a gate."""
    global_part: Tensor | None
    """What the second one contributes: weights = local_part + global_part."""


@torch.no_grad()
def attention_row(model: VarifocalForCausalLM, reading: Reading, *, layer: int, head: int, token: int) -> AttentionRow:
    """The row of one query in one head.

    The output of every mechanism is linear in the values, so the weights are its output for unit vectors as values: D
    keys in a row of a batch, whatever the mechanism does.
    """
    block = decoder_layer(model, layer)
    attention, mechanism = block.self_attn, block.self_attn.mechanism
    keys = token + 1
    hidden = reading.inputs[layer][None, :keys]
    x = block.input_layernorm(hidden)
    rotary = model.model.rotary_emb(hidden, torch.arange(keys, device=hidden.device)[None])
    q, k = attention.queries_and_keys(x, rotary)
    memory = mechanism.remember(x, q, k)
    width, x, q = q.shape[-1], x[:, -1:], q[:, :, -1:]
    at_once = max(1, min(MOST_ROWS, MOST_NUMBERS // k.numel()))

    def row() -> Tensor:
        weights = []
        for first in range(0, keys, width * at_once):
            values = unit_values(k, first, rows=min(at_once, -(-(keys - first) // width)))
            given = [one.expand(len(values), *one.shape[1:]) for one in (x, q, k)]
            known = None if memory is None else memory.expand(len(values), *memory.shape[1:])
            weights.append(mechanism(*given, values, memory=known).output[:, head, 0].flatten().float())
        return torch.cat(weights)[:keys]

    if not gates_of(mechanism):
        return AttentionRow(row(), None, None)
    gate = reading.records[layer]["gate"][head, token].float()
    with force_gates(mechanism, 1.0):
        local_part = gate * row()
    with force_gates(mechanism, 0.0):
        global_part = (1 - gate) * row()
    return AttentionRow(local_part + global_part, local_part, global_part)


def unit_values(k: Tensor, first: int, *, rows: int) -> Tensor:
    """Values [rows, G, S, D]: in row r, key first + r D + d has the unit vector d, and all others have 0."""
    _, heads, keys, width = k.shape
    values = k.new_zeros(rows, heads, keys, width)
    index = torch.arange(first, min(keys, first + rows * width), device=k.device)
    values[(index - first) // width, :, index, (index - first) % width] = 1
    return values
