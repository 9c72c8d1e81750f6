"""How much a mechanism reads and multiplies: what its attention costs, apart from how fast a kernel is."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from varifocal.attention.gates import GateConfig
from varifocal.attention.mechanisms.base import HeadShape, MechanismConfig
from varifocal.attention.mechanisms.bigbird import BigBirdConfig
from varifocal.attention.mechanisms.combiner import CombinerConfig
from varifocal.attention.mechanisms.context_adaptive import ContextAdaptiveConfig
from varifocal.attention.mechanisms.dynamic_sparse import DynamicSparseConfig
from varifocal.attention.mechanisms.local import LocalConfig
from varifocal.attention.mechanisms.sparse_geometric import SparseGeometricConfig
from varifocal.attention.mechanisms.sparse_transformer import SparseTransformerConfig
from varifocal.equations.branches import TopK


class Work(NamedTuple):
    """The forward work of one layer's attention for an average query of a text, all heads together."""

    keys_read: float
    """Keys (or summaries) of one head whose values are mixed; learned widths stand in the middle of their range."""
    reading_flops: float
    """q.k and p v over the keys read: 4 D for each key and head."""
    rating_flops: float
    """Products that only decide what is read, or how much it counts: ranking, gates, pair networks, summaries."""


def work(config: MechanismConfig, shape: HeadShape, length: int) -> Work:
    """The mean work of the queries of a text of `length` tokens."""
    place = torch.arange(length)
    read, rating = reads_and_ratings(config, shape, place)
    keys = float(read.double().mean())
    return Work(keys, 4 * shape.head_width * shape.heads * keys, shape.heads * float(rating.double().mean()))


def reads_and_ratings(config: MechanismConfig, shape: HeadShape, place: Tensor) -> tuple[Tensor, Tensor]:
    """Keys read, and floating-point operations of rating, of one head for queries at places [T]."""
    seen, width = place + 1, shape.head_width
    nothing = torch.zeros_like(place, dtype=torch.float64)
    gate = gate_flops(getattr(config, "gate", None), shape)
    match config:
        case LocalConfig():
            near = seen.clamp(max=config.window)
            return near + (seen - near).clamp(max=config.global_tokens), nothing
        case CombinerConfig():
            # A segment's summary value is one query's attention to its keys, spread over its tokens.
            return place % config.segment + 1 + place // config.segment, nothing + 4 * width
        case DynamicSparseConfig():
            top_k = config.top_k(None)
            index = 2 * width * config.rank * (1 + shape.kv_heads / shape.heads)
            return chosen_keys(top_k, place), rated_keys(top_k, seen) * 2 * config.rank + index
        case ContextAdaptiveConfig():
            top_k, middle = config.top_k(), (config.window_min + config.window_max) // 2
            near = seen.clamp(max=middle) * (config.reads != "global")
            far = chosen_keys(top_k, place) * (config.reads != "local")
            rated = rated_keys(top_k, seen) * 2 * width * (config.reads != "local")
            widths = 2 * shape.model_width * (config.width == "learned" and config.reads != "global")
            return near + far, rated + gate * (config.reads == "both") + widths
        case SparseGeometricConfig(sparsity="learned"):
            halves = 2 * 2 * width * config.hidden
            return seen, seen * (3.0 * config.hidden) + halves
        case SparseGeometricConfig(sparsity="fixed"):
            return strided(seen, config.stride), nothing
        case SparseTransformerConfig():
            return strided(seen, config.stride), nothing
        case BigBirdConfig():
            more = config.global_tokens + config.random_blocks * config.block
            return torch.minimum(seen, seen.clamp(max=config.window) + more), nothing
    return seen, nothing + gate


def chosen_keys(top_k: TopK, place: Tensor) -> Tensor:
    """Keys that a top-k reads."""
    if top_k.select == "exact":
        return top_k.keys_per_query(place)
    return top_k.blocks_per_query(place) * top_k.block + place % top_k.block + 1


def rated_keys(top_k: TopK, seen: Tensor) -> Tensor:
    """Keys, or blocks, that a top-k ranks."""
    return seen if top_k.select == "exact" else seen // top_k.block


def strided(seen: Tensor, stride: int) -> Tensor:
    """The last `stride` keys, and every stride-th one before them."""
    near = seen.clamp(max=stride)
    return near + (seen - near) // stride


def gate_flops(gate: GateConfig | None, shape: HeadShape) -> float:
    """Products of a gate's network for one head."""
    if gate is None or gate.kind in ("constant", "static"):
        return 0.0
    if gate.kind == "linear":
        return 2.0 * shape.model_width
    return 2.0 * gate.hidden * (shape.model_width / shape.heads + 1)
