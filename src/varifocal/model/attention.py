"""Qwen3's attention with a mechanism between its projections."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from varifocal.attention.attend import evaluate
from varifocal.attention.mechanisms import Mechanism, MechanismOutput, make_mechanism
from varifocal.attention.mechanisms.base import Part
from varifocal.attention.memories import Remembered
from varifocal.attention.weights import unit_values
from varifocal.equations.layout import Layout
from varifocal.model.config import VarifocalConfig
from varifocal.model.head_outputs import head_outputs
from varifocal.model.memory_layer import LayerOfCache
from varifocal.model.steps import normed_and_rotated, projected


class VarifocalAttention(Qwen3Attention):
    """Projections, norms and rotary embedding are Qwen3's, with its names; the mechanism's are under `mechanism`."""

    def __init__(self, config: VarifocalConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        # Qwen2 has these three biases and none on the output; Qwen3Attention knows all four or none.
        if config.qkv_bias and not config.attention_bias:
            for name in ("q_proj", "k_proj", "v_proj"):
                plain = getattr(self, name)
                setattr(self, name, nn.Linear(plain.in_features, plain.out_features, bias=True))
        if not config.qk_norm:
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        name, options = config.layer_mechanism(layer_idx)
        self.mechanism = make_mechanism(name, config.head_shape(), **options)
        self.head_outputs = head_outputs(config)
        if type(self.mechanism).reset_parameters is Mechanism.reset_parameters:
            # It starts as it was built, and transformers would give its parts a start of their own.
            for part in self.mechanism.modules():
                part._is_hf_initialized = True  # type: ignore[assignment]

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        layout: Layout,
        cache: Cache | None,
        output_attentions: bool = False,
    ) -> tuple[MechanismOutput, Tensor | None]:
        """The layer's attention of its normed input x [B, T, C]; the result's output is [B, T, C] too.

        Args:
            x: the normed input.
            rotary: cosines and sines [B or 1, T, D].
            layout: where the tokens stand.
            cache: takes their keys and values, if it is not None.
            output_attentions: whether to give the weights [B, H, T, S] of all keys too.
        """
        q, k = self.queries_and_keys(x, rotary)  # [B, H, T, D] and [B, G, T, D]
        v = self.by_head(projected(self.v_proj, x)).transpose(1, 2)
        # Under autocast the norms' weights widen q and k, and not v.
        q, k = q.to(v.dtype), k.to(v.dtype)
        memory = None if cache is None else LayerOfCache(cache, self.layer_idx, self.mechanism)
        attended: MechanismOutput = self.mechanism(x, q, k, v, memory=memory, layout=layout)
        weights = None
        if output_attentions:
            remembered = None if memory is None else memory.remembered
            weights = weights_of_keys(attended, q, remembered or Remembered(k, v), layout)
        output = attended.output if self.head_outputs is None else self.head_outputs(x, v, attended.output)
        # [B, T, H D]: a view, since the kernels keep the layout of q.
        return replace(attended, output=projected(self.o_proj, output.transpose(1, 2).flatten(2))), weights

    def by_head(self, projected: Tensor) -> Tensor:
        """[B, T, * D] as [B, T, *, D]."""
        return projected.view(*projected.shape[:2], projected.shape[2] // self.head_dim, self.head_dim)

    def queries_and_keys(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Queries [B, H, T, D] and keys [B, G, T, D] of the normed input x [B, T, C]: projected, normed, rotated."""
        q, k = self.by_head(projected(self.q_proj, x)), self.by_head(projected(self.k_proj, x))
        if not self.mechanism.rotates:
            rotary = torch.ones_like(rotary[0]), torch.zeros_like(rotary[1])
        return normed_and_rotated(self.q_norm, self.k_norm, q, k, rotary)


@torch.no_grad()
def weights_of_keys(attended: MechanismOutput, q: Tensor, remembered: Remembered, layout: Layout) -> Tensor:
    """[B, H, T, S]: how much of each of S keys the queries q [B, H, T, D] read, all branches together.

    The output is linear in the values, so the weights of D keys are the output for unit vectors as their values. A key
    that the memory has forgotten weighs 0, and so does every key for padding.
    """
    if attended.equation is None or attended.layout is None:
        raise ValueError("output_attentions=True asks a mechanism's equation, and this one attends without any")
    if not attended.parts:
        return weights_of_part(Part((), attended.equation, attended.layout, remembered), q, layout)
    weights = q.new_zeros(*q.shape[:3], layout.keys)
    for part in attended.parts:
        heads = list(part.heads)
        weights[:, heads] = weights_of_part(part, q[:, heads], layout)
    return weights


def weights_of_part(part: Part, q: Tensor, layout: Layout) -> Tensor:
    """[B, H, T, S] of heads that keep the same tokens; q is theirs, `layout` that of all S keys."""
    equation = part.equation.of_keys()
    k, sinks = part.remembered.k, part.remembered.sinks
    width, rows, kept = q.shape[3], [], k.shape[2]
    for first in range(0, kept, width):
        rows.append(evaluate(equation, q, k, unit_values(k, first), layout=part.layout).output)  # [B, H, T, D]
    weights = torch.cat(rows, dim=-1)[..., :kept]
    forgotten = layout.keys - kept
    found = pad(weights, (forgotten, 0))
    if not sinks or not forgotten:
        return found
    # What was kept in place of the first keys came from the start of a document that began before them.
    found[..., forgotten : forgotten + sinks] = 0.0
    places = layout.start.clamp(max=forgotten)[..., None] + torch.arange(sinks, device=q.device)  # [B, T, sinks]
    return found.scatter_add(-1, places[:, None].expand(*q.shape[:3], sinks), weights[..., :sinks])
