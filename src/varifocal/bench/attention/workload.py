"""The inputs of a measurement: sizes, and the tensors that every contender takes what it needs from."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from varifocal import PooledKeys


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One attention call: n queries on n keys, or a few queries on a cache of n keys."""

    length: int
    """n, the number of keys."""
    queries: int | None = None
    """The last that many positions ask; None for all."""
    batch: int = 1
    heads: int = 12
    kv_heads: int = 6
    head_width: int = 128
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    window: int = 256
    """The window of local and head_gated."""
    window_max: int = 512
    """The widest window of context_adaptive; its learned widths stand between `window` and this."""
    edge: int = 32
    k_scale: float = 1.0
    block: int = 64
    pair_hidden: int = 16
    index_rank: int = 32
    segment: int = 64

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")

    @property
    def asking(self) -> int:
        """T, the number of queries."""
        return self.length if self.queries is None else self.queries


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tensors of a workload."""

    workload: Workload
    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    """[B, H, T]: between 0 and 1."""
    width: Tensor
    """[B, H, T]: learned widths, at the middle of their range."""
    pair_queries: Tensor
    pair_keys: Tensor
    pair_output: Tensor
    head_scale: Tensor
    pooled: Tensor | None
    """For a few queries on a cache: the mean keys of its blocks, kept as they are while decoding."""
    index_queries: Tensor
    index_keys: Tensor
    cotangent: Tensor
    """[B, H, T, D]: the gradient of the output."""

    def leaves(self) -> dict[str, Tensor]:
        """The tensors that a backward pass may reach."""
        names = ("q", "k", "v", "gate", "width", "pair_queries", "pair_keys", "pair_output", "head_scale")
        return {name: getattr(self, name) for name in names}


def pool_keys(work: Workload, keys: Tensor) -> Tensor | None:
    """The mean keys of blocks [B, G, N, D] for a workload that decodes."""
    if work.queries is None:
        return None
    store = PooledKeys(
        batch=work.batch,
        kv_heads=work.kv_heads,
        capacity=work.length,
        head_width=work.head_width,
        block=work.block,
    )
    store.update(keys.cpu())
    return store.means.to(work.device)


def make_inputs(workload: Workload, *, seed: int = 0, exact: bool = False, dtype: torch.dtype | None = None) -> Inputs:
    """Random inputs; `exact` makes queries and keys multiples of 1/8, whose dot products have no rounding error.

    With exact dot products every implementation ranks keys alike, whatever its order of summation.
    """
    work = workload
    generator = torch.Generator().manual_seed(seed)
    rows, keys = (work.batch, work.heads, work.asking), (work.batch, work.kv_heads, work.length)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    def heads(*shape: int) -> Tensor:
        drawn = normal(*shape)
        return ((drawn * 8).round() / 8).clamp(-2, 2) if exact else drawn

    middle = (work.window + work.window_max) / 2
    tensors = {
        "q": heads(*rows, work.head_width),
        "k": heads(*keys, work.head_width),
        "v": normal(*keys, work.head_width),
        "gate": normal(*rows).sigmoid(),
        "width": torch.full(rows, middle) + normal(*rows, scale=4.0),
        "pair_queries": normal(*rows, work.pair_hidden),
        "pair_keys": normal(work.batch, work.heads, work.length, work.pair_hidden),
        "pair_output": normal(work.heads, work.pair_hidden, scale=work.pair_hidden**-0.5),
        "head_scale": torch.rand(work.heads, generator=generator) + 0.5,
        "index_queries": heads(*rows, work.index_rank),
        "index_keys": heads(*keys, work.index_rank),
        "cotangent": normal(*rows, work.head_width),
    }
    # What gates and pair networks make is float32 in a model of any type.
    narrow = {"q", "k", "v", "cotangent"}
    placed = {
        name: tensor.to(work.device, dtype or (work.dtype if name in narrow else torch.float32))
        for name, tensor in tensors.items()
    }
    inputs = Inputs(workload=work, pooled=pool_keys(work, placed["k"]), **placed)
    for tensor in inputs.leaves().values():
        tensor.requires_grad_()
    return inputs
