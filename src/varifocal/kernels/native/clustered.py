"""The last members of the query's cluster: a window, once the keys are in the order of their clusters.

Within a document the members of a cluster become neighbours, and those that a query reads a plain range that ends at
its own key: the mixture kernel reads it by tiles. Heads that read no cluster are a mixture of windows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from varifocal.equations.branches import Cluster
from varifocal.equations.layout import Layout
from varifocal.kernels.native.mixture import CAUSAL, MixtureBranch, mixture
from varifocal.kernels.native.scattered import FEW, Order, put, take


@dataclass(frozen=True, eq=False)
class ClusteredBranch:
    """Some heads read a window, the others the last members of a cluster."""

    clusters: Tensor
    """int64 [B, G, S]."""
    members: tuple[int, ...]
    """For each query head; 0 for one that reads its window."""
    windows: tuple[int, ...]
    """For each query head; 0 for one that reads its cluster."""


def as_clustered(cluster: Cluster, windows: tuple[int, ...]) -> ClusteredBranch | None:
    """A cluster beside windows of each head (0 for none); None if a head reads both and they differ."""
    sizes = cluster.size if isinstance(cluster.size, tuple) else (cluster.size,) * len(windows)
    members = tuple(CAUSAL if size is None else size for size in sizes)
    # The query's own key is a member of its cluster: a window of 1 adds nothing.
    if any(size and window > 1 for size, window in zip(members, windows, strict=True)):
        return None
    alone = tuple(0 if size else window for size, window in zip(members, windows, strict=True))
    return ClusteredBranch(cluster.clusters, members, alone)


def attend_clustered(
    q: Tensor, k: Tensor, v: Tensor, *, branch: ClusteredBranch, layout: Layout, scale: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, D] and logsumexp [B, H, T] (detached)."""
    if not q.numel():
        # It still hangs on whatever learns: the gradient of nothing is 0, and no error.
        return q + 0.0 * (k[:0].sum() + v[:0].sum()), q.new_zeros(q.shape[:3], dtype=torch.float32)
    position, start = layout.ranges
    groups = q.shape[1] // k.shape[1]
    routed = [head for head, size in enumerate(branch.members) if size]
    local = [head for head, size in enumerate(branch.members) if not size]
    parts: dict[int, tuple[Tensor, Tensor]] = {}
    if local:
        near = mixture(
            q[:, local], repeated(k, local, groups), repeated(v, local, groups),
            branches=[MixtureBranch(window=torch.tensor([branch.windows[head] for head in local], dtype=torch.int32))],
            position=position, start=start, scale=of_heads(scale, local),
        )  # fmt: skip
        parts |= {head: (near.output[:, at], near.logsumexp[:, at, :, 0]) for at, head in enumerate(local)}
    if routed:
        clusters = branch.clusters[:, [head // groups for head in routed]]
        sizes = torch.tensor([branch.members[head] for head in routed])
        order = order_of(clusters, sizes, layout)
        folded = [x.flatten(0, 1)[:, None] for x in (q[:, routed], repeated(k, routed, groups))]
        folded.append(repeated(v, routed, groups).flatten(0, 1)[:, None])  # [B Hr, 1, *, D]
        asked = folded[0] if order.queries is None else reorder(folded[0], order.queries)
        read = reorder if order.queries is not None and order.keys.shape[1] == k.shape[2] else take
        factor = of_heads(scale, routed)
        if isinstance(factor, Tensor):
            # Heads have become rows of the batch, which share a scale: it goes into the queries.
            asked = asked * factor.repeat(q.shape[0]).view(-1, 1, 1, 1).to(asked.dtype)
        far = mixture(
            asked, read(folded[1], order.keys), read(folded[2], order.keys),
            branches=[MixtureBranch(window=CAUSAL)], position=order.position, start=order.start,
            scale=1.0 if isinstance(factor, Tensor) else factor,
        )  # fmt: skip
        output, logsumexp = far.output, far.logsumexp.detach()
        if order.queries is not None:
            output = put_back(output, order.queries)
            logsumexp = put(torch.empty_like(logsumexp), order.queries, logsumexp)
        output = output.view(q.shape[0], len(routed), *q.shape[2:])
        logsumexp = logsumexp.view(q.shape[0], len(routed), q.shape[2])
        parts |= {head: (output[:, at], logsumexp[:, at]) for at, head in enumerate(routed)}
    heads = range(q.shape[1])
    return torch.stack([parts[h][0] for h in heads], dim=1), torch.stack([parts[h][1].detach() for h in heads], dim=1)


def repeated(x: Tensor, heads: list[int], groups: int) -> Tensor:
    """The key head of each of some query heads."""
    return x[:, [head // groups for head in heads]]


def of_heads(scale: Tensor | float, heads: list[int]) -> Tensor | float:
    """The scale of some heads."""
    return scale[heads] if isinstance(scale, Tensor) else scale


def order_of(clusters: Tensor, sizes: Tensor, layout: Layout) -> Order:
    """Keys by document and cluster; rows are those of batch and heads [B Hr] together. Clusters are [B, Hr, S]."""
    batch, heads, keys = clusters.shape
    rows = clusters.flatten(0, 1)  # [B Hr, S]
    sizes = sizes.repeat(batch)[:, None]

    def for_heads(x: Tensor) -> Tensor:
        return x.repeat_interleave(heads, dim=0)

    position, start = for_heads(layout.position), for_heads(layout.start)
    own = position.clamp(0, max(keys - 1, 0))
    blind = start > position
    if position.shape[1] <= FEW:
        return order_of_few(rows, sizes, own, start, blind)
    place = for_heads(layout.key_place)
    many = int(rows.max()) + 1 if rows.numel() else 1
    kind = torch.where(place >= 0, for_heads(layout.key_start) * many + rows, keys * many + many)
    ordered = kind.sort(dim=1, stable=True)
    rank = torch.empty_like(ordered.indices).scatter_(1, ordered.indices, torch.arange(keys).expand_as(rows))
    last = rank.gather(1, own)
    first = torch.searchsorted(ordered.values, kind.gather(1, own).contiguous())
    queries = last.argsort(dim=1, stable=True)
    begin = torch.maximum(first, last - sizes + 1).masked_fill(blind, 1)
    last = last.masked_fill(blind, 0)
    return Order(ordered.indices, queries, last.gather(1, queries).int(), begin.gather(1, queries).int())


def order_of_few(rows: Tensor, sizes: Tensor, own: Tensor, start: Tensor, blind: Tensor) -> Order:
    """A stretch of its own for every query: the last members, in the order of the text, at its end."""
    keys = rows.shape[1]
    index = torch.arange(keys)
    member = rows[:, None] == rows.gather(1, own)[..., None]  # [B Hr, T, S]
    member &= (index <= own[..., None]) & (index >= start[..., None])
    most = min(int(sizes.max()), keys)
    last = torch.where(member, index, -1).topk(most, dim=-1).values.flip(-1)  # ascending, after those that are none
    count = torch.minimum((last >= 0).sum(dim=-1), sizes)
    end = (torch.arange(own.shape[1]) + 1) * most - 1
    return Order(
        last.clamp(min=0).flatten(1),
        None,
        end.expand_as(own).masked_fill(blind, 0).int(),
        (end - count + 1).masked_fill(blind, 1).int(),
    )


class Reordered(torch.autograd.Function):
    """Rows [B, *, S, D] in the order of an index [B, S] that names each once: the gradient is the reverse order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        return take(rows, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return put(torch.empty_like(grads[0]), index, grads[0]), None


class PutBack(torch.autograd.Function):
    """The reverse of `Reordered`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        return put(torch.empty_like(rows), index, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return take(grads[0], index), None


def reorder(rows: Tensor, index: Tensor) -> Tensor:
    """`take` for an index that names every row once."""
    found: Tensor = Reordered.apply(rows, index)  # type: ignore[no-untyped-call]
    return found


def put_back(rows: Tensor, index: Tensor) -> Tensor:
    """The reverse."""
    found: Tensor = PutBack.apply(rows, index)  # type: ignore[no-untyped-call]
    return found
