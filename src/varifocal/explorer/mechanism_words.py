"""What the layers' mechanisms read, in the words of the page."""

from __future__ import annotations

from dataclasses import dataclass

from varifocal.attention.mechanisms import MechanismConfig
from varifocal.attention.mechanisms.bigbird import BigBirdConfig
from varifocal.attention.mechanisms.combiner import CombinerConfig
from varifocal.attention.mechanisms.context_adaptive import ContextAdaptiveConfig
from varifocal.attention.mechanisms.dynamic_sparse import DynamicSparseConfig
from varifocal.attention.mechanisms.head_gated import HeadGatedConfig
from varifocal.attention.mechanisms.local import LocalConfig
from varifocal.attention.mechanisms.sparse_geometric import SparseGeometricConfig
from varifocal.attention.mechanisms.sparse_transformer import SparseTransformerConfig


@dataclass(frozen=True)
class Reach:
    """How a mechanism's reading is told and drawn."""

    words: str
    window: int | None = None
    """Keys of the window that all its tokens share, their own included."""
    edge: int = 0
    """Keys over which a window fades out."""


def describe(config: MechanismConfig) -> Reach:
    """What a mechanism of this config reads."""
    if isinstance(config, HeadGatedConfig):
        return Reach(f"a gate mixes local, the last {config.window} keys, with global, every key", config.window)
    if isinstance(config, ContextAdaptiveConfig):
        sizes = f"a window of {config.window_min} to {config.window_max} keys, as wide as the token asks"
        if config.width == "fixed":
            sizes = f"a window of {(config.window_min + config.window_max) // 2} keys"
        if config.reads == "local":
            return Reach(f"no gate: {sizes}", edge=config.edge)
        best = f"the keys that it rates highest, about {config.k_scale:g} √n of n"
        if config.reads == "global":
            return Reach(f"no gate: {best}")
        return Reach(f"a gate mixes local, {sizes}, with global, {best}", edge=config.edge)
    if isinstance(config, LocalConfig):
        first = f" and the first {config.global_tokens} of the text" if config.global_tokens else ""
        return Reach(f"no gate: the last {config.window} keys{first}", config.window)
    if isinstance(config, BigBirdConfig):
        drawn = f"the first {config.global_tokens} of the text and {config.random_blocks} random blocks"
        return Reach(f"no gate: the last {config.window} keys, {drawn}", config.window)
    if isinstance(config, SparseTransformerConfig):
        every = f"and before them every {config.stride}th"
        return Reach(f"no gate: the last {config.stride} keys {every}", config.stride)
    if isinstance(config, CombinerConfig):
        return Reach(f"no gate: its own segment of {config.segment} keys, and a summary of each earlier one")
    if isinstance(config, DynamicSparseConfig):
        return Reach(f"no gate: the keys that an indexer rates highest, about {config.k_scale:g} √n of n")
    if isinstance(config, SparseGeometricConfig) and config.sparsity == "learned":
        return Reach("no gate on branches: every key, each pair of query and key with a gate of its own")
    return Reach("no gate: every key")
