"""The gates of a fit: one share for each key head of a frozen model, between a window and the whole text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from varifocal.attention.mechanisms import HeadShape
from varifocal.attention.mechanisms.base import Call, Mechanism, MechanismConfig, two_way
from varifocal.attention.mechanisms.focused import Focused, FocusedConfig
from varifocal.attention.mechanisms.sinks import with_sinks
from varifocal.equations.branches import Branch, Causal, Window
from varifocal.equations.equation import Equation
from varifocal.model.head import logits_of
from varifocal.model.modeling import VarifocalForCausalLM

LOGITS_AT_A_TIME = 256
"""Bounds the number of logits that exist at once."""
Reading = Literal["everything", "mixture", "map"]


@dataclass(frozen=True, kw_only=True)
class FocusGatesConfig(MechanismConfig):
    """What a windowed head reads."""

    window: int = 256
    sinks: int = 4


class InputGates(NamedTuple):
    """Shares from the token's own input, f = sigmoid(W x + b): the paper's gate, one for each key head."""

    weight: Tensor
    """W, [layers, key heads, C] or of one layer [key heads, C]."""
    bias: Tensor
    """b, [layers, key heads] or of one layer [key heads]."""

    def of_layer(self, layer: int) -> InputGates:
        """Those of one layer."""
        return InputGates(self.weight[layer], self.bias[layer])

    def shares(self, x: Tensor) -> Tensor:
        """[B, T, G] for the inputs x [B, T, C] of a layer, which are brought to a mean square of 1."""
        scaled = x.float() * x.float().square().mean(dim=-1, keepdim=True).clamp(min=1e-12).rsqrt()
        return F.linear(scaled, self.weight, self.bias).sigmoid()


class FocusGates(Mechanism[FocusGatesConfig]):
    """f * dense attention + (1 - f) * attention to a window and the first tokens, with a share f for each key head."""

    name = "focus_gates"
    config_type = FocusGatesConfig

    def __init__(self, config: FocusGatesConfig | None = None, shape: HeadShape | None = None) -> None:
        super().__init__(config, shape)
        self.shares = torch.ones(self.shape.kv_heads)
        """f of each key head, set before each pass; a leaf or a function of what is fitted."""
        self.by_input: InputGates | None = None
        """What gives f of each token instead, if it depends on the token's input."""
        self.used = self.shares
        """The mean f of each key head in the last pass."""
        self.reading: Reading = "mixture"
        self.full: tuple[bool, ...] = (True,) * self.shape.kv_heads
        """By key head, whether it reads everything; for the reading "map"."""

    def near(self) -> Branch:
        """What a windowed head reads."""
        return with_sinks(Window(self.config.window), self.config.sinks)

    def mapped(self) -> Branch:
        """What each head reads by the map."""
        windows = tuple(None if full else self.config.window for full in self.full)
        return Focused(FocusedConfig(windows=windows, sinks=self.config.sinks), self.shape).branch

    def equation(self, call: Call) -> Equation:
        if self.reading == "everything":
            return Equation((Causal(),))
        if self.reading == "map":
            return Equation((self.mapped(),))
        batch, heads, queries, _ = call.q.shape
        shares = self.shares.expand(batch, queries, -1) if self.by_input is None else self.by_input.shares(call.x)
        self.used = shares.mean(dim=(0, 1))
        near = 1 - shares.transpose(1, 2).repeat_interleave(heads // self.shape.kv_heads, dim=1)
        gate = near.to(call.q)  # [B, H, T]
        return Equation((self.near(), Causal()), two_way(gate))


class GatedModel:
    """A model whose layers have such gates, with its weights frozen."""

    def __init__(self, model: VarifocalForCausalLM, *, window: int, sinks: int) -> None:
        self.model = model.eval().requires_grad_(False)
        config = FocusGatesConfig(window=window, sinks=sinks)
        self.gates: list[FocusGates] = []
        for layer in model.model.layers:
            attention: Any = layer.self_attn
            attention.mechanism = FocusGates(config, attention.mechanism.shape)
            self.gates.append(attention.mechanism)

    @property
    def layers(self) -> int:
        return len(self.gates)

    @property
    def kv_heads(self) -> int:
        return self.gates[0].shape.kv_heads

    @property
    def width(self) -> int:
        """C."""
        return self.gates[0].shape.model_width

    @contextmanager
    def reading(self, how: Reading) -> Iterator[None]:
        """Inside the block all layers read in one way."""
        before = [gate.reading for gate in self.gates]
        for gate in self.gates:
            gate.reading = how
        try:
            yield
        finally:
            for gate, one in zip(self.gates, before, strict=True):
                gate.reading = one

    @contextmanager
    def by_map(self, full: Sequence[Sequence[bool]]) -> Iterator[None]:
        """Inside the block heads read everything or a window as the map says."""
        for gate, heads in zip(self.gates, full, strict=True):
            gate.full = tuple(heads)
        with self.reading("map"):
            yield

    def hidden(self, tokens: Tensor, shares: Tensor | InputGates | None = None) -> Tensor:
        """The last hidden states [B, T, C] of tokens [B, T]; with shares [layers, key heads] as they mix."""
        for layer, gate in enumerate(self.gates if shares is not None else ()):
            gate.by_input = shares.of_layer(layer) if isinstance(shares, InputGates) else None
            if isinstance(shares, Tensor):
                gate.shares = shares[layer]
        states: Tensor = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
        return states

    def used(self) -> Tensor:
        """[layers, key heads]: the mean shares of the last pass that mixed."""
        return torch.stack([gate.used for gate in self.gates])

    def token_losses(self, tokens: Tensor, states: Tensor) -> Tensor:
        """[T - 1]: the loss in nats of every token after the first of tokens [T], from their hidden states [T, C]."""
        wanted, parts = tokens[1:], []
        for first in range(0, len(wanted), LOGITS_AT_A_TIME):
            part = slice(first, min(first + LOGITS_AT_A_TIME, len(wanted)))
            parts.append(F.cross_entropy(logits_of(self.head(), states[part]).float(), wanted[part], reduction="none"))
        return torch.cat(parts)

    def head(self) -> nn.Module:
        """What makes logits of hidden states."""
        head: nn.Module = self.model.lm_head
        return head
