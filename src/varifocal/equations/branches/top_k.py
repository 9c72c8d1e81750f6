"""The keys that a query rates highest: Gupta et al., Top-k Attention, arXiv:2106.06899."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from varifocal.equations.branches.base import Branch, less, require_at_least, require_finite
from varifocal.equations.branches.own_block import OwnBlock

Select = Literal["exact", "blocks"]
FEW = 16
"""Queries whose k is worked out one by one."""
LARGEST = 2**62
"""More keys than any text has, and still an int64."""


@dataclass(frozen=True, eq=False)
class Indexer:
    """Low-rank queries and keys that select in place of the true scores: DeepSeek-AI, DeepSeek-V3.2, 2025.

    The indexer receives no gradient from the output; `dynamic_sparse` trains it with a divergence of its own.
    """

    queries: Tensor
    """[B, I, T, R] with H a multiple of I: query head h is served by indexer head h // (H / I)."""
    keys: Tensor
    """[B, J, S, R] with I a multiple of J."""


@dataclass(frozen=True, eq=False)
class TopK(Branch):
    """The k best keys of each query and head, k_i = min(i + 1, max(minimum, ceil(scale * sqrt(i + 1)))).

    i is the query's place in its document. Of equal scores the lower index wins. The selected scores get exact
    gradients, the selection none. With select="blocks" the query reads its own block of keys and the
    ceil(k_i / block) best of the earlier ones, ranked by the mean of their keys.
    """

    scale: float = 1.0
    """The factor of the square root; 0 for a constant k."""
    minimum: int = 1
    """The least k (as far as there are keys)."""
    select: Select = "exact"
    """"exact" ranks every key, "blocks" ranks blocks by their mean key (Lu et al., MoBA, arXiv:2502.13189)."""
    block: int = 64
    """Keys in a block, for select="blocks"."""
    indexer: Indexer | None = None
    """Ranks the keys in place of the scores."""

    def __post_init__(self) -> None:
        require_at_least("top-k minimum", self.minimum, 1)
        require_finite("top-k scale", self.scale, least=0)
        require_at_least("block", self.block, 1)
        if self.select not in ("exact", "blocks"):
            raise ValueError(f"top-k select must be 'exact' or 'blocks', got {self.select!r}")
        if self.indexer is not None and not isinstance(self.indexer, Indexer):
            raise ValueError(f"top-k indexer must be an Indexer(queries, keys) or None, got {self.indexer!r}")

    @property
    def own(self) -> OwnBlock:
        """What a query reads unranked, with select="blocks"."""
        return OwnBlock(self.block)

    def keys_per_query(self, place: Tensor) -> Tensor:
        """int64: k for queries at the given places in their documents."""
        if are_few(place):
            return torch.tensor([self.keys_of(one) for one in place.flatten().tolist()]).view(place.shape)
        seen = (place + 1).clamp(min=0)
        # No more than there are, before it becomes a whole number: 1e30 would not fit into one.
        wanted = torch.minimum((self.scale * seen.double().sqrt()).ceil(), seen.double()).long()
        return torch.minimum(seen, wanted.clamp(min=min(self.minimum, LARGEST)))

    def keys_of(self, place: int) -> int:
        """k of one query."""
        seen = max(place + 1, 0)
        return min(seen, max(self.minimum, math.ceil(min(self.scale * math.sqrt(seen), seen))))

    def blocks_of(self, place: int) -> int:
        """How many blocks before its own one query reads."""
        return min(-(-self.keys_of(place) // self.block), max(place, 0) // self.block)

    def most_keys(self, keys: int) -> int:
        """The largest k of any query of a row of `keys` keys."""
        return min(keys, max(self.minimum, math.ceil(min(self.scale * math.sqrt(keys), keys))))

    def most_blocks(self, keys: int) -> int:
        """The largest number of blocks before its own that any query of a row of `keys` keys reads."""
        return min(-(-self.most_keys(keys) // self.block), keys // self.block)

    @property
    def ranks(self) -> bool:
        return True

    def listed(self, keys: int) -> int:
        """How many indices the last query of a row of `keys` keys selects."""
        last = torch.tensor([keys - 1])
        return int(self.keys_per_query(last) if self.select == "exact" else self.blocks_per_query(last))

    def near(self, place: Tensor) -> Tensor:
        return self.own.near(place) if self.select == "blocks" else torch.zeros_like(place)

    def count(self, place: Tensor, *, beyond: Tensor | int = 0) -> Tensor:
        """The selected keys; those nearer than `beyond` count as selected before any other."""
        keys = self.keys_per_query(place)
        if self.select == "blocks":
            keys = self.blocks_per_query(place) * self.block + self.own.near(place)
        return less(keys, beyond)

    def rating_flops(self, place: Tensor, head_width: int) -> Tensor:
        rated = place + 1 if self.select == "exact" else torch.div(place + 1, self.block, rounding_mode="floor")
        width = head_width if self.indexer is None else self.indexer.queries.shape[-1]
        return rated * 2 * width

    def reads_everything(self, place: Tensor) -> Tensor:
        if self.select == "exact":
            return self.keys_per_query(place) > place
        return self.blocks_per_query(place) >= torch.div(place, self.block, rounding_mode="floor")

    def blocks_per_query(self, place: Tensor) -> Tensor:
        """int64: how many blocks before its own a query reads, as far as there are any."""
        if are_few(place):
            return torch.tensor([self.blocks_of(one) for one in place.flatten().tolist()]).view(place.shape)
        wanted = (self.keys_per_query(place) + self.block - 1) // self.block
        return torch.minimum(wanted, torch.div(place.clamp(min=0), self.block, rounding_mode="floor"))


def are_few(place: Tensor) -> bool:
    """Whether plain numbers cost less than a handful of torch's operators: so it is for decoded tokens."""
    return not torch.compiler.is_compiling() and 0 < place.numel() <= FEW and place.device.type == "cpu"
