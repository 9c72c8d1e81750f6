"""What is compared: Hugging Face's Qwen3, and our model with each mechanism, all on the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from varifocal.bench.rows import rows_of_ours
from varifocal.model import VarifocalForCausalLM, preset
from varifocal.model.loss import linear_cross_entropy, next_token_labels
from varifocal.plan.hardware import Precision

BASELINE = "qwen3 sdpa"
LEAN_BASELINE = "qwen3 sdpa, our loss"
"""Hugging Face's layers with our loss, so that only the attention differs."""


def contender_names() -> tuple[str, ...]:
    """The baselines, and every mechanism of ours in each of its ways to run."""
    return (BASELINE, LEAN_BASELINE, *rows_of_ours())


@dataclass(frozen=True, eq=False)
class Contender:
    """A model and how its loss is computed."""

    name: str
    model: Any
    precision: Precision = "float32"
    """With bfloat16, weights stay float32 and products run in bfloat16, as in training."""

    def loss(self, ids: Tensor) -> Tensor:
        """The mean loss of the tokens [B, T], with a graph for the backward pass."""
        with self.precisely(ids.device):
            return self.plain_loss(ids)

    def precisely(self, device: torch.device) -> torch.autocast:
        """A context in which products run in the contender's precision."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bfloat16")

    def plain_loss(self, ids: Tensor) -> Tensor:
        """The loss in the precision of the surrounding context."""
        if self.name != LEAN_BASELINE:
            loss: Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
            return loss
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        labels = next_token_labels(ids, None).flatten()
        total: Tensor = linear_cross_entropy(hidden.flatten(0, 1), self.model.lm_head.weight, labels)
        return total / (labels >= 0).sum()


def build(
    name: str,
    preset_name: str,
    *,
    context: int,
    layers: int | None = None,
    device: torch.device | None = None,
    precision: Precision = "float32",
) -> Contender:
    """A contender of that name at the sizes of a preset, in training mode, on a device (None: the CPU)."""
    if name not in contender_names():
        raise ValueError(f"unknown contender {name!r}; known are {', '.join(contender_names())}")
    mechanism, options = rows_of_ours().get(name, ("dense", {}))
    sizes = {} if layers is None else {"num_hidden_layers": layers}
    config = preset(
        preset_name, mechanism=mechanism, mechanism_options=options, max_position_embeddings=context, **sizes
    )
    torch.manual_seed(0)
    if name not in (BASELINE, LEAN_BASELINE):
        return Contender(name, VarifocalForCausalLM(config).to(device).train(), precision)
    theirs = Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        rope_parameters=config.rope_parameters,
        attn_implementation="sdpa",
    )
    return Contender(name, Qwen3ForCausalLM(theirs).to(device).train(), precision)


class HoldsModel(Protocol):
    """Whatever is compared: it has a model."""

    @property
    def model(self) -> Any: ...


def share_weights(contenders: Sequence[HoldsModel]) -> list[nn.Parameter]:
    """Give all contenders the very tensors of the first one's weights; returns every parameter there is, once."""
    first = dict(contenders[0].model.named_parameters())
    for contender in contenders[1:]:
        for name, module in contender.model.named_modules():
            for leaf in list(module._parameters):
                full = f"{name}.{leaf}" if name else leaf
                if full in first:
                    module._parameters[leaf] = first[full]
        contender.model.tie_weights()
    unique = {id(p): p for contender in contenders for p in contender.model.parameters()}
    return list(unique.values())
