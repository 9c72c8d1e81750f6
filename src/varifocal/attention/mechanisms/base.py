"""What all mechanisms share: the shape of a layer's heads, a frozen config, one forward, one result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from varifocal.attention.attend import attend, lay_out
from varifocal.equations.branches import Branch
from varifocal.equations.layout import Layout
from varifocal.equations.problem import Attended


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """The sizes of the attention layer that a mechanism serves; the defaults are those of the papers' model."""

    model_width: int = 512
    """C, the width of the layer input."""
    heads: int = 12
    """H, query heads."""
    kv_heads: int = 6
    """G, key and value heads."""
    head_width: int = 128
    """D."""

    def __post_init__(self) -> None:
        for name in ("model_width", "heads", "kv_heads", "head_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")


@dataclass(frozen=True, kw_only=True)
class MechanismConfig:
    """The options of one mechanism: a frozen value, saved with a model."""


@dataclass(frozen=True, eq=False)
class MechanismOutput:
    """What a mechanism returns."""

    output: Tensor
    """[B, H, T, D]."""
    losses: dict[str, Tensor] = field(default_factory=dict)
    """Auxiliary losses by name, with their coefficients, to be added to the loss."""
    records: dict[str, Tensor] = field(default_factory=dict)
    """What is worth recording, detached: "gate" [B, H, T], "decides" bool [B, T] or [B, H, T] (where the gate has
    any effect),
    "width" [B, H, T], "selected" [B, H, T, K] (Attended.selected)."""


class RankedBlocks(NamedTuple):
    """What a top-k by blocks ranks."""

    keys: Tensor
    """[B, *, S, F]."""
    block: int
    """Keys in a block."""


class SummarizedSegments(NamedTuple):
    """What summaries of segments are made of."""

    queries: Tensor
    """[B, H, S, D]."""
    keys: Tensor
    """[B, G, S, D]."""
    values: Tensor
    """[B, G, S, D]."""
    length: int
    """Keys in a segment."""


class Call(NamedTuple):
    """The arguments of one forward pass, as a mechanism sees them."""

    x: Tensor
    """[B, T, C]: the layer's normed input at the queries."""
    q: Tensor
    k: Tensor
    v: Tensor
    memory: Tensor | None
    """[B, *, S, F]: what `remember` made of every key."""
    documents: Tensor | None
    positions: Tensor | None
    pooled: Tensor | None
    """[B, *, N, F]: what a cache kept of each block of keys: the mean of what is ranked, or a summary."""
    backend: str

    def attend(self, branches: Branch | tuple[Branch, ...], **options: Any) -> Attended:
        """attend on this call's queries, keys and values."""
        return attend(
            self.q,
            self.k,
            self.v,
            branches=branches,
            documents=self.documents,
            positions=self.positions,
            backend=self.backend,
            **options,
        )

    def layout(self) -> Layout:
        """Where this call's queries stand."""
        return lay_out(self.q, self.k, self.v, documents=self.documents, positions=self.positions)


ConfigT = TypeVar("ConfigT", bound=MechanismConfig)


class Mechanism(nn.Module, Generic[ConfigT]):
    """An attention mechanism: given a layer's normed input and its queries, keys and values, the heads' output.

    Subclasses say which config they take, what (if anything) past keys must carry in a cache (`remember`), and how
    the branches, weights and score of the equation are chosen (`focus`).
    """

    name: str
    """The stem: the mechanism's name in configs, files and docs."""
    config_type: type[ConfigT]

    def __init__(self, config: ConfigT | None = None, shape: HeadShape | None = None) -> None:
        super().__init__()
        self.config: ConfigT = self.config_type() if config is None else config
        self.shape = HeadShape() if shape is None else shape

    def reset_parameters(self) -> None:
        """Initialise the mechanism's own parameters, if it has any."""

    def remember(self, x: Tensor, q: Tensor, k: Tensor) -> Tensor | None:
        """What later queries need of these tokens besides k and v, to be kept with them in a cache.

        Args:
            x: the layer's normed input [B, T, C].
            q: queries [B, H, T, D].
            k: keys [B, G, T, D].

        Returns:
            [B, *, T, F], or None if keys and values are all that later queries need.
        """
        return None

    def ranked_blocks(self, k: Tensor, memory: Tensor | None) -> RankedBlocks | None:
        """What a cache may pool while it decodes: the keys that a top-k by blocks ranks; None if there are none.

        Args:
            k: keys [B, G, S, D].
            memory: `remember` of them [B, *, S, F].
        """
        return None

    def summarized_segments(self, k: Tensor, v: Tensor, memory: Tensor | None) -> SummarizedSegments | None:
        """What a cache may summarize while it decodes; None if nothing is read in summary. Arguments as above."""
        return None

    def focus(self, call: Call) -> MechanismOutput:
        """Choose branches, weights and score, and attend."""
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        memory: Tensor | None = None,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        pooled: Tensor | None = None,
        backend: str = "auto",
    ) -> MechanismOutput:
        """Attend from queries to keys.

        Args:
            x: the layer's normed input at the queries [B, T, C].
            q: queries [B, H, T, D], rotary embedding and norms already applied.
            k: keys [B, G, S, D]; with a cache, S > T.
            v: values [B, G, S, D].
            memory: [B, *, S, F], `remember` of all S keys; None if the call holds every key's x and q (T = S).
            documents: integers [B, S], as in attend.
            positions: integers [T] or [B, T], as in attend.
            pooled: [B, *, N, F], the means of `ranked_blocks` as `PooledKeys` keeps them, or the summaries of
                `summarized_segments` as `SegmentSummaries` does. They save work, nothing else.
            backend: as in attend.
        """
        self.check(x, q, k)
        if memory is None and q.shape[2] == k.shape[2] and positions is None:
            memory = self.remember(x, q, k)
        return self.focus(Call(x, q, k, v, memory, documents, positions, pooled, backend))

    def check(self, x: Tensor, q: Tensor, k: Tensor) -> None:
        """ValueError unless x, q and k have this mechanism's sizes."""
        shape = self.shape
        if q.ndim != 4 or q.shape[1] != shape.heads or q.shape[3] != shape.head_width:
            raise ValueError(
                f"{self.name} expects q [B, {shape.heads}, T, {shape.head_width}] (heads and head width of its shape), "
                f"got {tuple(q.shape)}"
            )
        if k.ndim != 4 or k.shape[1] != shape.kv_heads or k.shape[3] != shape.head_width:
            raise ValueError(
                f"{self.name} expects k and v [B, {shape.kv_heads}, S, {shape.head_width}] (kv_heads and head width of "
                f"its shape), got {tuple(k.shape)}"
            )
        if x.ndim != 3 or tuple(x.shape) != (q.shape[0], q.shape[2], shape.model_width):
            expected = (q.shape[0], q.shape[2], shape.model_width)
            raise ValueError(f"{self.name} expects x [B, T, C] = {expected}, got {tuple(x.shape)}")

    def needed_memory(self, call: Call) -> Tensor:
        """The call's memory; ValueError if a cached call did not bring it."""
        if call.memory is None:
            raise ValueError(
                f"{self.name} needs memory=remember(x, q, k) of all {call.k.shape[2]} keys "
                f"when {call.q.shape[2]} queries stand at positions of their own; keep it in the cache"
            )
        return call.memory


def two_way(gate: Tensor) -> Tensor:
    """The weights [B, H, T, 2] of two branches from a gate [B, H, T]: g for the first, 1 - g for the second."""
    return torch.stack((gate, 1 - gate), dim=-1)
