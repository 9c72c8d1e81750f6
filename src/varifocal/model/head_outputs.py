"""What may be done to the output of each head before heads are joined; off by default, and nothing at its start.

Both come from the records of short trainings in modded-nanogpt (github.com/KellerJordan/modded-nanogpt).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from varifocal.model.config import VarifocalConfig


class HeadOutputs(nn.Module):
    """y_h -> 2 sigmoid(W_h x[:n]) (y_h - tanh(a_h) (y_h . v) v / |v|^2), where v is the token's own value.

    The first factor is a gate on each head's output that reads n dimensions of the layer's input (12 there); the second
    takes a share of the token's own value away, which the residual stream has anyway. W and a start at 0: nothing is
    changed.
    """

    def __init__(self, heads: int, *, gate_inputs: int, own_value: bool) -> None:
        super().__init__()
        self.gate_weight = nn.Parameter(torch.zeros(heads, gate_inputs)) if gate_inputs else None
        self.own_value = nn.Parameter(torch.zeros(heads)) if own_value else None

    def forward(self, x: Tensor, v: Tensor, output: Tensor) -> Tensor:
        """The changed output [B, H, T, D] of the layer's input x [B, T, C] and the tokens' values v [B, G, T, D]."""
        if self.own_value is not None:
            own = v.repeat_interleave(output.shape[1] // v.shape[1], dim=1)  # [B, H, T, D]
            share = (output * own).sum(-1, keepdim=True) / own.square().sum(-1, keepdim=True).clamp(min=1e-12)
            output = output - torch.tanh(self.own_value)[:, None, None] * share * own
        if self.gate_weight is not None:
            logits = x[..., : self.gate_weight.shape[1]] @ self.gate_weight.T  # [B, T, H]
            output = output * (2 * torch.sigmoid(logits)).transpose(1, 2)[..., None]
        return output

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Back to the start; what a checkpoint gave stays."""
        for parameter in self.parameters():
            if not getattr(parameter, "_is_hf_initialized", False):
                parameter.zero_()


def head_outputs(config: VarifocalConfig) -> HeadOutputs | None:
    """What the config asks for; None for nothing."""
    if not config.output_gate and not config.remove_own_value:
        return None
    return HeadOutputs(config.num_attention_heads, gate_inputs=config.output_gate, own_value=config.remove_own_value)
