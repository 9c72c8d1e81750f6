"""Which heads of a model share an attention of the engine, and a cache with it.

An engine gives each of its attentions pages of one size, so all of them get the same number of key heads: the most by
which every group of heads with equal windows, in every layer, can be divided.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from typing import Any

import torch

from varifocal.attention.mechanisms import HeadShape, make_mechanism
from varifocal.attention.mechanisms.base import Step
from varifocal.equations.branches import Branch, Causal, Prefix, Window
from varifocal.equations.branches.base import Union
from varifocal.equations.branches.head_sizes import EVERY_KEY, HeadSizes

SERVED = "dense, local, head_gated and focused"


@dataclass(frozen=True)
class Reach:
    """What a head reads and therefore keeps."""

    window: int | None = None
    """The last keys, the query's own included; None for all."""
    sinks: int = 0
    """The first tokens of the text beside them."""


@dataclass(frozen=True)
class Unit:
    """Key heads of a layer that share an attention of the engine."""

    heads: tuple[int, ...]
    reach: Reach


@dataclass(frozen=True)
class LayerPlan:
    """How one layer is served."""

    units: tuple[Unit, ...]
    near: int | None = None
    """The window of a second attention over the same keys, which a gate mixes with the first."""
    sink_logit: bool = False


class UnservableError(ValueError):
    """A mechanism that an engine's caches cannot hold."""


def plan_heads(config: Any, *, ranks: int = 1) -> tuple[LayerPlan, ...]:
    """How every layer of a VarifocalConfig is served; ValueError of one sentence if one cannot be.

    Args:
        config: of the model.
        ranks: processes that share the heads of every layer; units do not span them.
    """
    if config.weights is not None:
        raise UnservableError(
            "vLLM serves plain numbers, and this model holds int8 weights; load it with weights='float32' and save "
            "it again"
        )
    if config.output_gate or config.remove_own_value:
        raise UnservableError("vLLM serves the outputs of heads as they are; output_gate and remove_own_value are not")
    layers = [config.layer_mechanism(layer) for layer in range(config.num_hidden_layers)]
    shape = config.head_shape()
    described = json.dumps([[name, options] for name, options in layers])
    return planned(described, shape, ranks)


@functools.lru_cache(maxsize=16)
def planned(described: str, shape: HeadShape, ranks: int) -> tuple[LayerPlan, ...]:
    """The plan of layers that are described as JSON."""
    found = [read_layer(layer, name, options, shape) for layer, (name, options) in enumerate(json.loads(described))]
    if ranks > 1 and (shape.kv_heads % ranks or shape.heads % ranks):
        raise UnservableError(
            f"tensor parallel over {ranks} ranks needs a multiple of {ranks} query and key heads, and this model has "
            f"{shape.heads} and {shape.kv_heads}; use tensor_parallel_size=1"
        )
    each = shape.kv_heads // ranks
    parts = [reaches[first : first + each] for reaches, _, _ in found for first in range(0, shape.kv_heads, each)]
    size = math.gcd(*(part.count(reach) for part in parts for reach in set(part)))
    plans = []
    for reaches, near, sink_logit in found:
        units = []
        for first in range(0, shape.kv_heads, each):
            own = range(first, first + each)
            for reach in dict.fromkeys(reaches[first : first + each]):
                heads = [head for head in own if reaches[head] == reach]
                units += [Unit(tuple(heads[at : at + size]), reach) for at in range(0, len(heads), size)]
        plans.append(LayerPlan(tuple(units), near, sink_logit))
    return tuple(plans)


def read_layer(
    layer: int, name: str, options: dict[str, Any], shape: HeadShape
) -> tuple[list[Reach], int | None, bool]:
    """What each key head of a layer reads, the window of its near branch, and whether it has sink logits."""
    with torch.device("meta"):
        mechanism = make_mechanism(name, shape, **options)
    step = mechanism.step()
    if step is None:
        raise UnservableError(
            f"vLLM serves {SERVED}, and layer {layer} attends by {name}; generate with `varifocal generate`"
        )
    return reaches_of(step, layer, name, shape)


def reaches_of(step: Step, layer: int, name: str, shape: HeadShape) -> tuple[list[Reach], int | None, bool]:
    """The same, of a step."""
    reaches = [reaches_of_branch(branch, shape) for branch in step.branches]
    if any(reach is None for reach in reaches):
        raise UnservableError(
            f"vLLM serves windows and the first tokens, and layer {layer} ({name}) reads {step.branches}"
        )
    each = [reach for reach in reaches if reach is not None]
    if step.gate is None and len(each) == 1:
        return each[0], None, step.sink is not None
    near, far = each
    if set(far) != {Reach()} or len(set(near)) > 1 or step.sink is not None:
        raise UnservableError(f"vLLM mixes one window with all keys, and layer {layer} ({name}) mixes {step.branches}")
    if near[0].sinks:
        raise UnservableError(
            f"vLLM cannot give the window of {name} the first {near[0].sinks} tokens beside all keys (layer {layer}); "
            "train or fit with sinks=0"
        )
    return far, near[0].window, False


def reaches_of_branch(branch: Branch, shape: HeadShape) -> list[Reach] | None:
    """What each key head reads, if that is a window, the first tokens or everything."""
    parts = branch.branches if isinstance(branch, Union) else (branch,)
    window: list[int | None] = []
    sinks = [0] * shape.heads
    for part in parts:
        if isinstance(part, Causal):
            window = [None] * shape.heads
        elif isinstance(part, Window):
            window = [None if size in (None, EVERY_KEY) else size for size in by_head(part.size, shape.heads)]
        elif isinstance(part, Prefix):
            sinks = [size or 0 for size in by_head(part.size, shape.heads)]
        else:
            return None
    if not window:
        return None
    group = shape.heads // shape.kv_heads
    each = [Reach(size, 0 if size is None else first) for size, first in zip(window, sinks, strict=True)]
    heads = [each[head * group : (head + 1) * group] for head in range(shape.kv_heads)]
    return [head[0] for head in heads] if all(len(set(head)) == 1 for head in heads) else None


def by_head(size: HeadSizes, heads: int) -> tuple[int | None, ...]:
    """A size for each query head."""
    return size if isinstance(size, tuple) else (size,) * heads
