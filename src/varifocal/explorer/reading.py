"""One forward pass of a model over a text, with its gates as learned or held, and what is kept of it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from varifocal.attention.forced_gates import force_gates
from varifocal.explorer.waiting import Waiting
from varifocal.model import VarifocalForCausalLM
from varifocal.model.modeling import VarifocalDecoderLayer

Gates = Literal["learned", "local", "global"]
"""The learned mixture, or all gates of all layers held at the first branch or at the second."""

KEPT = ("gate", "decides", "width")
"""The records that are kept; the rest can be computed again for one token."""


@dataclass(frozen=True, eq=False)
class Reading:
    """What is kept of one pass over T tokens."""

    inputs: tuple[Tensor, ...]
    """The input [T, C] of each layer, before its norm."""
    last: Tensor
    """[T, C]: the states from which the head computes the next token's logits."""
    records: tuple[dict[str, Tensor], ...]
    """What the mechanism of each layer decided: gate [H, T], decides [T] or [H, T], width [H, T]."""

    def size(self) -> int:
        """Bytes."""
        tensors = [*self.inputs, self.last, *(tensor for record in self.records for tensor in record.values())]
        return sum(tensor.nbytes for tensor in tensors)


def read_tokens(model: VarifocalForCausalLM, ids: list[int], gates: Gates, waiting: Waiting | None = None) -> Reading:
    """Read a text once; AbandonedError if nobody waits for it any more."""
    waiting = Waiting() if waiting is None else waiting
    if gates == "learned":
        return one_pass(model, ids, waiting)
    with force_gates(model, 1.0 if gates == "local" else 0.0):
        return one_pass(model, ids, waiting)


@torch.no_grad()
def one_pass(model: VarifocalForCausalLM, ids: list[int], waiting: Waiting) -> Reading:
    """The pass itself, with the gates as they are."""
    tokens = torch.tensor([ids], device=model.device)
    waiting.require()
    waiting.begin(len(model.model.layers))
    with ExitStack() as stack:
        for layer in model.model.layers:
            stack.callback(layer.register_forward_hook(lambda *_: waiting.step()).remove)
        output = model.model(input_ids=tokens, use_cache=False, output_hidden_states=True, output_records=True)
    *inputs, last = (hidden[0] for hidden in output.hidden_states)
    if not bool(last.isfinite().all()):
        raise ValueError("the model's numbers are not finite for this text; its weights are damaged or have diverged")
    records = tuple({name: record[name][0] for name in KEPT if name in record} for record in output.records)
    return Reading(tuple(inputs), last, records)


def decoder_layer(model: VarifocalForCausalLM, layer: int) -> VarifocalDecoderLayer:
    """A layer of the model."""
    return cast(VarifocalDecoderLayer, model.model.layers[layer])
