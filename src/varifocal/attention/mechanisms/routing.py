"""Keys of the query's own cluster: Roy et al., Routing Transformer, arXiv:2003.05997, made causal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from varifocal.attention.mechanisms.ablation import Ablation, plain
from varifocal.attention.mechanisms.base import Call, HeadShape, Mechanism, MechanismConfig, Scale
from varifocal.attention.mechanisms.variant import Variant
from varifocal.attention.memories import KeysAndValues, Memory
from varifocal.attention.precision import wide
from varifocal.equations.branches import Branch, Cluster, Window
from varifocal.equations.branches.base import require_at_least
from varifocal.equations.equation import Equation


@dataclass(frozen=True, kw_only=True)
class RoutingConfig(MechanismConfig):
    """How many clusters, how many of their members are read, and by which heads."""

    clusters: int = 64
    """Centroids of each key head."""
    members: int = 128
    """Keys of its cluster that a query reads, its own included."""
    window: int = 128
    """Keys that a local head reads, its own included."""
    local: bool = True
    """Whether the first half of the query heads read a window instead of a cluster, as in the paper."""
    decay: float = 0.999
    """What is kept of a centroid when it moves towards the mean of its members, at every training step."""

    def __post_init__(self) -> None:
        for name in ("clusters", "members", "window"):
            require_at_least(name, getattr(self, name), 1)
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must be at least 0 and below 1, got {self.decay}")


class ClusteredKeys(KeysAndValues):
    """Keys, values and the cluster of every key."""

    def __init__(self, routing: Routing) -> None:
        super().__init__()
        self.routing = routing

    def notes(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """int64 [B, G, T, 1]."""
        return {"clusters": self.routing.clusters_of(k)[..., None]}

    def __deepcopy__(self, memo: dict[int, Any]) -> ClusteredKeys:
        memo[id(self.routing)] = self.routing
        return super().__deepcopy__(memo)


class Routing(Mechanism[RoutingConfig]):
    """One softmax over the last members of the query's cluster; half of the heads read a window instead.

    A token belongs to the centroid nearest to its own key, layer-normed, in each key head. The centroids follow the
    keys by a moving average while the mechanism trains, and stand still in evaluation.
    """

    name = "routing"
    config_type = RoutingConfig
    variants = (
        Variant({"clusters": 3, "members": 4, "window": 5}),
        Variant({"clusters": 2, "members": 6, "local": False}, "no window"),
    )
    ablations = (
        Ablation(name="no_window", question="every head reads clusters", options=plain(local=False)),
        Ablation(name="frozen", question="random centroids that stay where they start", options=plain(decay=0.9999999)),
    )
    centroids: Tensor

    def __init__(self, config: RoutingConfig | None = None, shape: HeadShape | None = None) -> None:
        super().__init__(config, shape)
        size = (self.shape.kv_heads, self.config.clusters, self.shape.head_width)
        self.register_buffer("centroids", torch.empty(size))
        self._assigned: Tensor | None = None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Random directions, the same in every key head: shared heads then start alike."""
        drawn = torch.randn(self.config.clusters, self.shape.head_width)
        self.centroids.copy_(F.normalize(drawn, dim=-1).expand_as(self.centroids))

    def memory(self) -> Memory:
        return ClusteredKeys(self)

    def clusters_of(self, k: Tensor) -> Tensor:
        """int64 [B, G, T]: the nearest centroid of every key; a token's own, whatever comes before or after it."""
        if self.learns() and in_backward() and self._assigned is not None and self._assigned.shape == k.shape[:3]:
            # Recomputed for the backward pass, after the centroids have moved on.
            return self._assigned
        directions = directed(k.detach())
        found = (directions @ self.centroids.to(directions.dtype).mT).argmax(dim=-1)
        self._assigned = found if self.learns() else None
        return found

    def learns(self) -> bool:
        """Whether centroids move: in training, where gradients are asked for."""
        return self.training and torch.is_grad_enabled()

    def equation(self, call: Call) -> Equation:
        clusters = self.note(call, "clusters")[..., 0]
        if self.learns() and not in_backward():
            self.move_centroids(call.k, clusters, call.layout.key_place >= 0)
        return Equation((self.branch(clusters),))

    def branch(self, clusters: Tensor) -> Branch:
        """The cluster, in all heads or in the second half of them."""
        heads, config = self.shape.heads, self.config
        near = heads // 2 if config.local else 0
        if not near:
            return Cluster(clusters, config.members)
        windows = (config.window,) * near + (1,) * (heads - near)
        return Window(windows) | Cluster(clusters, (0,) * near + (config.members,) * (heads - near))

    @torch.no_grad()
    def move_centroids(self, k: Tensor, clusters: Tensor, counted: Tensor) -> None:
        """Towards the mean of their members among keys [B, G, S, D]; the same on all ranks."""
        kv_heads, many, width = self.centroids.shape
        weights = counted[:, None].expand_as(clusters).to(wide(k).dtype)  # [B, G, S]
        slot = (clusters + many * torch.arange(kv_heads, device=k.device)[:, None]).flatten()
        sums = weights.new_zeros(kv_heads * many, width + 1)
        entries = torch.cat((directed(k), torch.ones_like(weights)[..., None]), dim=-1) * weights[..., None]
        sums.index_add_(0, slot, entries.flatten(0, 2))
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums)
        sums = sums.view(kv_heads, many, width + 1)
        count = sums[..., -1:]
        centroids = self.centroids.to(sums.dtype)
        moved = centroids + (1 - self.config.decay) * (sums[..., :-1] / count.clamp(min=1) - centroids)
        self.centroids.copy_(F.normalize(torch.where(count > 0, moved, centroids), dim=-1))

    @classmethod
    def scaled_options(cls, scale: Scale) -> dict[str, Any]:
        return {"clusters": scale.root, "members": 2 * scale.root, "window": scale.window}

    def words(self) -> str:
        near = f"; half of the heads the last {self.config.window} keys" if self.config.local else ""
        return f"no gate: the last {self.config.members} keys of the token's own cluster{near}"

    def rating_flops(self) -> float:
        """The products of every key with the centroids."""
        return 2.0 * self.centroids.numel()


def directed(k: Tensor) -> Tensor:
    """Keys [..., D] layer-normed and of length 1, in float32 or wider; NaN, which only padding holds, as 0."""
    k = wide(k)
    return F.normalize(F.layer_norm(k.masked_fill(k.isnan(), 0.0), k.shape[-1:]), dim=-1)


def in_backward() -> bool:
    """Whether a backward pass is under way, which recomputes what was not kept."""
    return bool(torch._C._current_graph_task_id() != -1) if not torch.compiler.is_compiling() else False
