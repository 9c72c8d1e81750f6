"""What a layer does between its matrix products: in one pass each where the native kernels run, else by transformers.

The modules, their parameters and their meaning are transformers'; the kernels are held to them by tests.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, apply_rotary_pos_emb

from varifocal.kernels.native import library
from varifocal.kernels.steps import product
from varifocal.kernels.steps.norm import norm
from varifocal.kernels.steps.swiglu import swiglu
from varifocal.model.bare import is_bare
from varifocal.model.recompute import recomputed


def runs_natively(*tensors: Tensor) -> bool:
    """Whether the kernels take these tensors. Compiled code does better without them, it fuses the steps itself."""
    return (
        library.why_missing() is None
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and all(one.device.type == "cpu" and one.dtype == torch.float32 for one in tensors)
    )


def projected(module: nn.Module, x: Tensor) -> Tensor:
    """module(x) [..., N] for a linear module and x [..., C], by the library that multiplies faster here."""
    if is_bare(module, nn.Linear) and runs_natively(x) and product.is_faster(x, module.weight):  # type: ignore[arg-type]
        return product.linear(x, module.weight, module.bias)  # type: ignore[arg-type]
    result: Tensor = module(x)
    return result


def normed(module: nn.Module, x: Tensor) -> Tensor:
    """x [B, T, C] through a norm of Qwen3's; the backward pass keeps the result, or x where it must."""
    if not is_bare(module, Qwen3RMSNorm):
        result: Tensor = module(x)
    elif runs_natively(x, module.weight):  # type: ignore[arg-type]
        result = norm(x, module.weight, module.variance_epsilon)  # type: ignore[arg-type]
    else:
        result = recomputed(module, x)
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
    norms = [one for one in (q_norm, k_norm) if is_bare(one, Qwen3RMSNorm)]
    if len(norms) == 2 and runs_natively(q, k, cosines, *(one.weight for one in norms)):  # type: ignore[arg-type]
        return tuple(
            norm(x, one.weight, one.variance_epsilon, cosines=cosines, sines=sines).transpose(1, 2)  # type: ignore[arg-type]
            for one, x in zip(norms, (q, k), strict=True)
        )  # type: ignore[return-value]

    def by_modules(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        turned: tuple[Tensor, Tensor] = apply_rotary_pos_emb(
            q_norm(q).transpose(1, 2), k_norm(k).transpose(1, 2), cosines, sines
        )
        return turned

    # A rotation alone keeps nothing; norms keep a few tensors of q's size.
    rotated: tuple[Tensor, Tensor] = recomputed(by_modules, q, k) if len(norms) == 2 else by_modules(q, k)
    return rotated


def fed_forward(module: nn.Module, x: Tensor) -> Tensor:
    """The normed x [B, T, C] through Qwen3's feed-forward part; of its inner tensors the backward pass keeps two."""
    if not is_bare(module, Qwen3MLP):
        replaced: Tensor = module(x)
        return replaced
    gate_proj, up_proj, down_proj = (getattr(module, name) for name in ("gate_proj", "up_proj", "down_proj"))
    gate, up = projected(gate_proj, x), projected(up_proj, x)
    native = is_bare(module.act_fn, SiLUActivation) and runs_natively(gate, up)  # type: ignore[arg-type]
    if native and is_bare(down_proj, nn.Linear) and product.is_faster(gate, down_proj.weight):
        inner = product.gated_linear(gate, up, down_proj.weight)
        return inner if down_proj.bias is None else inner + down_proj.bias

    def activated(gate: Tensor, up: Tensor) -> Tensor:
        inner = swiglu(gate, up) if native else module.act_fn(gate) * up  # type: ignore[operator]
        projected: Tensor = down_proj(inner)
        return projected

    # Computed again, an adapter's dropout would draw other numbers.
    result: Tensor = recomputed(activated, gate, up) if is_bare(down_proj, nn.Linear) else activated(gate, up)
    return result
