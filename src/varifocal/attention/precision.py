"""Gates, widths and indexers compute in float32 or wider, whatever the type of the layer and under autocast."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from varifocal.equations.problem import accumulation_dtype


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float32, or in float64 if it is float64."""
    return tensor.to(accumulation_dtype(tensor.dtype))


def project_heads(heads: Tensor, weight: Tensor) -> Tensor:
    """weight_h . heads [B, H, T, P] from heads [B, H, T, D] and weight [H, P, D], in float32 or wider, autocast or not.

    NaN counts as 0: where a token is seen its dot product carries the NaN anyway, and where it is padding the NaN
    must not reach the weight's gradient. The backward pass keeps `heads` as they are, and no copy without NaN.
    """

    def project(heads: Tensor) -> Tensor:
        heads = heads.masked_fill(heads.isnan(), 0.0)
        # Autocast would round both factors to 16 bits again.
        with torch.autocast(heads.device.type, enabled=False):
            return heads @ weight.to(heads.dtype).mT

    heads = wide(heads)
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return project(heads)
    projected: Tensor = checkpoint(project, heads, use_reentrant=False, preserve_rng_state=False)
    return projected


class WideLinear(nn.Linear):
    """A linear layer that computes in float32 or wider, whatever the type of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        """The layer applied to x [..., C]."""
        x = wide(x)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, self.weight.to(x.dtype), bias)


def wide_linear(layer: nn.Module, x: Tensor) -> Tensor:
    """A WideLinear, or what has taken its place (an adapter around it), applied to x [..., C], autocast or not.

    The layer is called, never read: adapters, hooks and other kinds of weights take part.
    """
    x = wide(x)
    with torch.autocast(x.device.type, enabled=False):
        return wide(layer(x))
