"""The last members of the query's own cluster: Roy et al., Routing Transformer, arXiv:2003.05997, made causal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from varifocal.equations.branches.base import Branch, less
from varifocal.equations.branches.head_sizes import HeadSizes, for_heads, require_sizes


@dataclass(frozen=True, eq=False)
class Cluster(Branch):
    """The last `size` keys of the document, the query's own included, that are in the cluster of the query's own key.

    What a token belongs to follows from the token alone, so later tokens change nothing for earlier ones.
    """

    clusters: Tensor
    """int64 [B, G, S]: the number of the cluster of every key, in each key head."""
    size: HeadSizes
    """Members that are read; or a tuple with a number for each query head (0 for none)."""

    def __post_init__(self) -> None:
        require_sizes("cluster size", self.size, least=0 if isinstance(self.size, tuple) else 1)

    def count(self, place: Tensor, *, beyond: Tensor | int = 0) -> Tensor:
        """As many as there are at the most; those nearer than `beyond` count as members before any other."""
        sizes = for_heads(self.size, place)
        seen = (place if isinstance(sizes, int) else place.unsqueeze(-2)).add(1).clamp(min=0)
        return less(seen.clamp(max=sizes), beyond)

    def allows(self, position: Tensor, visible: Tensor, heads: int) -> Tensor:
        """bool [B, H, T, S], from the queries' own keys [B, T] and what they can see [B, 1, T, S]."""
        clusters = self.clusters.repeat_interleave(heads // self.clusters.shape[1], dim=1)  # [B, H, S]
        own = clusters.gather(2, position.clamp(min=0)[:, None].expand(-1, heads, -1))  # [B, H, T]
        member = (own[..., None] == clusters[:, :, None]) & visible
        # How many members follow a key, itself included.
        rank = member.flip(-1).cumsum(dim=-1).flip(-1)
        return member & (rank <= for_heads(self.size, torch.empty(0, device=rank.device), pairs=True))
