"""What a layer does between its matrix products: in one pass each where the native kernels run, else by transformers.

The modules, their parameters and their meaning are transformers'; the kernels are held to them by tests.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, apply_rotary_pos_emb

from varifocal.kernels.native import library
from varifocal.kernels.steps.norm import norm
from varifocal.kernels.steps.swiglu import swiglu
from varifocal.model.recompute import recomputed


def runs_natively(*tensors: Tensor) -> bool:
    """Whether the kernels take these tensors. Compiled code does better without them, it fuses the steps itself."""
    return (
        library.why_missing() is None
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and all(one.device.type == "cpu" and one.dtype == torch.float32 for one in tensors)
    )


def normed(module: nn.Module, x: Tensor) -> Tensor:
    """x [B, T, C] through a norm of Qwen3's; the backward pass keeps the result, or x where it must."""
    if isinstance(module, Qwen3RMSNorm) and runs_natively(x, module.weight):
        return norm(x, module.weight, module.variance_epsilon)
    result: Tensor = recomputed(module, x)
    return result


def normed_and_rotated(
    q_norm: nn.Module, k_norm: nn.Module, q: Tensor, k: Tensor, rotary: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Queries [B, H, T, D] and keys [B, G, T, D] from their projections [B, T, H, D] and [B, T, G, D].

    Args:
        q_norm, k_norm: norms over D of Qwen3's, or nn.Identity.
        q, k: the projections.
        rotary: cosines and sines [B or 1, T, D].
    """
    cosines, sines = rotary
    norms = [one for one in (q_norm, k_norm) if isinstance(one, Qwen3RMSNorm)]
    if len(norms) == 2 and runs_natively(q, k, cosines, *(one.weight for one in norms)):
        return tuple(
            norm(x, one.weight, one.variance_epsilon, cosines=cosines, sines=sines).transpose(1, 2)
            for one, x in zip(norms, (q, k), strict=True)
        )  # type: ignore[return-value]

    def by_modules(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        turned: tuple[Tensor, Tensor] = apply_rotary_pos_emb(
            q_norm(q).transpose(1, 2), k_norm(k).transpose(1, 2), cosines, sines
        )
        return turned

    # A rotation alone keeps nothing; norms keep a few tensors of q's size.
    rotated: tuple[Tensor, Tensor] = recomputed(by_modules, q, k) if norms else by_modules(q, k)
    return rotated


def fed_forward(module: Qwen3MLP, x: Tensor) -> Tensor:
    """The normed x [B, T, C] through Qwen3's feed-forward part; of its inner tensors the backward pass keeps two."""
    native = module.config.hidden_act == "silu" and runs_natively(x, module.gate_proj.weight)

    def activated(gate: Tensor, up: Tensor) -> Tensor:
        inner = swiglu(gate, up) if native else module.act_fn(gate) * up
        projected: Tensor = module.down_proj(inner)
        return projected

    result: Tensor = recomputed(activated, module.gate_proj(x), module.up_proj(x))
    return result
