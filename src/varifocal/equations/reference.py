"""The law: every branch and score in plain torch, with all pairs written out. No speed tricks, no kernels.

For each branch m, a key j has a log-weight (0 where it is read in full, minus infinity where it is not read) that
is added to its score; softmax over what is left, times the branch's weight, summed over the branches.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from varifocal.equations.blocks import Blocks, make_blocks
from varifocal.equations.branches import (
    Branch,
    Cluster,
    Compressed,
    FixedBranch,
    Segments,
    SoftWindow,
    TopK,
    members,
)
from varifocal.equations.layout import Layout
from varifocal.equations.normalizers import Entmax, Polynomial, SinkLogit
from varifocal.equations.problem import Attended, Problem, accumulation_dtype
from varifocal.equations.scores import Pairs, Score

NOTHING = float("-inf")


@dataclass(frozen=True, eq=False)
class Scene:
    """A problem in the accumulation dtype, key heads repeated for every query head, unseen entries blanked."""

    q: Tensor
    """[B, H, T, D]."""
    k: Tensor
    """[B, H, S, D]."""
    v: Tensor
    """[B, H, S, D]."""
    score: Score
    layout: Layout
    visible: Tensor
    """bool [B, 1, T, S]."""
    unseen_key: Tensor
    """bool [B, 1, S, 1]: keys that no query of the row may see."""
    scores: Tensor
    """[B, H, T, S]."""


@dataclass(frozen=True, eq=False)
class Reading:
    """What one branch may read: scores with the branch's log-weights added [B, H, T, K], and their values."""

    scores: Tensor
    values: Tensor
    """[B, H, K, D]."""


def attend_reference(problem: Problem) -> Attended:
    """Evaluate the equation as it is written."""
    if problem.normalizer is not None and not isinstance(problem.normalizer, SinkLogit | Entmax | Polynomial):
        raise ValueError(f"the reference has no such normalizer, got {problem.normalizer!r}")
    device = problem.q.device.type
    # Autocast would round the products to 16 bits. Not every device has it: "meta" has not.
    with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
        return attend_branches(problem)


def attend_branches(problem: Problem) -> Attended:
    """The mixture of all branches."""
    scene = make_scene(problem)
    output = torch.zeros_like(scene.q)
    logsumexps: list[Tensor] = []
    selections: list[Tensor | None] = []
    for number, branch in enumerate(problem.branches):
        reading, selected = read(branch, scene)
        probabilities, logsumexp = softmax(reading.scores)
        if isinstance(problem.normalizer, Entmax | Polynomial):
            probabilities = problem.normalizer.weigh(reading.scores)
        mean = probabilities @ reading.values
        if problem.relative_values is not None:
            mean = mean + by_distance(probabilities, problem.relative_values.to(mean.dtype), scene.layout)
        if isinstance(problem.normalizer, SinkLogit):
            mean = mean * problem.normalizer.share(logsumexp)[..., None]
        if problem.weights is not None:
            mean = mean * problem.weights[..., number, None].to(mean.dtype)
        output = output + mean
        logsumexps.append(logsumexp.detach())
        selections.append(selected)
    return Attended(output.to(problem.q.dtype), torch.stack(logsumexps, dim=-1), tuple(selections))


def make_scene(problem: Problem) -> Scene:
    """Widen the types, repeat the key heads, and blank what nobody sees: padding may hold anything, even NaN."""
    dtype = accumulation_dtype(problem.q.dtype)
    visible = problem.layout.visible()[:, None]  # [B, 1, T, S]
    blind_query = ~visible.any(dim=3)[..., None]  # [B, 1, T, 1]
    unseen_key = ~visible.any(dim=2)[..., None]  # [B, 1, S, 1]
    heads = problem.q.shape[1]
    q = problem.q.to(dtype).masked_fill(blind_query, 0.0)
    k = problem.k.to(dtype).masked_fill(unseen_key, 0.0)
    v = problem.v.to(dtype).masked_fill(unseen_key, 0.0)
    k, v = for_every_head(k, heads), for_every_head(v, heads)
    score = problem.score.prepare(dtype, blind_query, unseen_key)
    query, key = problem.layout.pair_places()
    scores = score.rate(q @ k.mT, Pairs(query[:, None], key[:, None], q.shape[-1]))
    return Scene(q, k, v, score, problem.layout, visible, unseen_key, scores)


def softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax of scores [B, H, T, K] over the last dimension, and their logsumexp [B, H, T].

    Where nothing is read all weights are 0 and the logsumexp is minus infinity, with gradient 0.
    """
    if scores.shape[-1] == 0:
        return scores, scores.sum(dim=-1) + NOTHING
    # The shift cancels in the result, so no gradient needs to follow it.
    highest = scores.detach().amax(dim=-1, keepdim=True)
    # Minus infinity minus itself would be NaN where nothing is read.
    highest = torch.where(highest == NOTHING, 0.0, highest)
    exponentials = (scores - highest).exp()
    total = exponentials.sum(dim=-1, keepdim=True)
    nothing = total == 0
    probabilities = exponentials / total.masked_fill(nothing, 1.0)
    logsumexp = (total.masked_fill(nothing, 1.0).log() + highest).masked_fill(nothing, NOTHING)
    return probabilities, logsumexp.squeeze(-1)


def by_distance(weights: Tensor, rows: Tensor, layout: Layout) -> Tensor:
    """What rows [N, D] add, row min(x, N - 1) for each key at distance x, to the mean under weights [B, H, T, S]."""
    query, key = layout.pair_places()
    distance = (query - key).clamp(0, rows.shape[0] - 1)[:, None].expand_as(weights)
    summed = weights.new_zeros(*weights.shape[:3], rows.shape[0]).scatter_add(-1, distance, weights)
    return summed @ rows


def read(branch: Branch, scene: Scene) -> tuple[Reading, Tensor | None]:
    """The scores and values that a branch reads, and what its top-k (if it has one) selected."""
    if isinstance(branch, Compressed):
        return read_compressed(branch, scene), None
    log_weight = torch.full_like(scene.visible, NOTHING, dtype=scene.scores.dtype)
    summaries: list[Reading] = []
    selected: Tensor | None = None
    for member in members(branch):
        if isinstance(member, TopK):
            weight, selected = top_k_log_weight(member, scene)
        else:
            weight = position_log_weight(member, scene)
        log_weight = torch.maximum(log_weight, weight)
        if isinstance(member, Segments):
            summaries.append(read_summaries(member, scene))
    unread = (log_weight == NOTHING) | ~scene.visible
    scores = scene.scores + log_weight.masked_fill(unread, 0.0)
    readings = [Reading(scores.masked_fill(unread, NOTHING), scene.v), *summaries]
    joined = Reading(
        torch.cat([reading.scores for reading in readings], dim=-1),
        torch.cat([reading.values for reading in readings], dim=-2),
    )
    return joined, selected


def position_log_weight(branch: Branch, scene: Scene) -> Tensor:
    """The log-weight [B, H or 1, T, S] of a branch that follows from positions (and learned widths)."""
    query, key = scene.layout.pair_places()
    query, key = query[:, None], key[:, None]  # [B, 1, T, 1], [B, 1, T, S]
    if isinstance(branch, SoftWindow):
        return branch.log_weight(query - key, branch.width.to(scene.scores.dtype)[..., None])
    if isinstance(branch, Cluster):
        allowed = branch.allows(scene.layout.position, scene.visible, scene.q.shape[1])
    elif isinstance(branch, Segments):
        allowed = branch.own.allows(query, key)
    elif isinstance(branch, FixedBranch):
        allowed = branch.allows(query, key)
    else:
        raise ValueError(f"the reference does not know the branch {branch!r}")
    return torch.zeros_like(allowed, dtype=scene.scores.dtype).masked_fill(~allowed, NOTHING)


def top_k_log_weight(branch: TopK, scene: Scene) -> tuple[Tensor, Tensor]:
    """The log-weight [B, H, T, S] of the selected keys, 0, and of the others, minus infinity; and the selection."""
    with torch.no_grad():
        if branch.select == "exact":
            scores = rank_scores(branch, scene, keys=None) if branch.indexer is not None else scene.scores
            budget = branch.keys_per_query(scene.layout.query_place)
            read, selected = best(scores.masked_fill(~scene.visible, NOTHING), budget)
        else:
            read, selected = select_blocks(branch, scene)
        return torch.zeros_like(scene.scores).masked_fill(~read, NOTHING), selected


def select_blocks(branch: TopK, scene: Scene) -> tuple[Tensor, Tensor]:
    """The keys [B, H, T, S] of the best complete blocks and of the query's own; and the blocks' first keys."""
    blocks = make_blocks(scene.layout, branch.block)
    average = blocks.member.to(scene.k.dtype)
    average = (average / average.sum(dim=-1, keepdim=True).clamp(min=1))[:, None]  # [B, 1, N, S]
    scores = rank_scores(branch, scene, keys=average)
    earlier = blocks.earlier(scene.layout)[:, None]  # [B, 1, T, N]
    budget = branch.blocks_per_query(scene.layout.query_place)
    read, selected = best(scores.masked_fill(~earlier, NOTHING), budget)
    keys = torch.einsum("bhtn,bns->bhts", read.to(average.dtype), blocks.member.to(average.dtype)) > 0
    query, key = scene.layout.pair_places()
    own = branch.own.allows(query, key)
    first = blocks.first[:, None, None].expand(*selected.shape[:3], -1)
    firsts = first.gather(-1, selected.clamp(min=0).long()) if selected.numel() else selected
    return keys | own[:, None], torch.where(selected >= 0, firsts, -1).int()


def rank_scores(branch: TopK, scene: Scene, *, keys: Tensor | None) -> Tensor:
    """Scores [B, H, T, S or N] that rank keys, or blocks if `keys` [B, 1, N, S] averages them."""
    if branch.indexer is None:
        queries, candidates = scene.q, scene.k
    else:
        queries = branch.indexer.queries.to(scene.q.dtype)
        candidates = branch.indexer.keys.to(scene.q.dtype).masked_fill(scene.unseen_key, 0.0)
    if keys is not None:
        candidates = keys @ candidates
    heads = scene.q.shape[1]
    products = for_every_head(queries, heads) @ for_every_head(candidates, heads).mT
    if branch.indexer is not None:
        return products
    return scene.score.rate_blocks(products, head_width=scene.q.shape[-1])


def for_every_head(entries: Tensor, heads: int) -> Tensor:
    """Entries [B, G, S, D] of shared heads, repeated for each of the query heads: [B, H, S, D]."""
    return entries.repeat_interleave(heads // max(entries.shape[1], 1), dim=1)


def best(scores: Tensor, budget: Tensor) -> tuple[Tensor, Tensor]:
    """The `budget` [B, T] highest of `scores` [B, H, T, S]: as a mask, and as ascending indices [B, H, T, K], then -1.

    Of equal scores the lower index wins; entries of minus infinity are never selected.
    """
    rank = torch.arange(scores.shape[-1], device=scores.device)
    if torch.compiler.is_exporting():
        # No look at values, and of what programs are exported to, ONNX has no sort that keeps the order of equals.
        width, read = scores.shape[-1], best_by_threshold(scores, budget)
    else:
        width = min(int(budget.max()) if budget.numel() else 0, scores.shape[-1])
        ranked = scores.sort(dim=-1, descending=True, stable=True)
        taken = (rank < budget[:, None, :, None]) & (ranked.values > NOTHING)
        read = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, ranked.indices, taken)
    ascending = torch.where(read, rank, scores.shape[-1]).sort(dim=-1).values[..., :width]
    return read, torch.where(ascending < scores.shape[-1], ascending, -1).int()


def best_by_threshold(scores: Tensor, budget: Tensor) -> Tensor:
    """The mask of `best` from the lowest score that is selected: all above it, and the first of those equal to it."""
    budget = budget[:, None, :, None]
    last = (budget - 1).clamp(min=0).expand(*scores.shape[:3], 1)
    threshold = scores.sort(dim=-1, descending=True).values.gather(-1, last)
    above, equal = scores > threshold, scores == threshold
    left = budget - above.sum(dim=-1, keepdim=True)
    return (above | (equal & (equal.cumsum(dim=-1) <= left))) & (scores > NOTHING)


def read_summaries(branch: Segments, scene: Scene) -> Reading:
    """One summary key and value for each earlier segment of the query's document."""
    blocks = make_blocks(scene.layout, branch.length)
    member = blocks.member[:, None]  # [B, 1, N, S]
    queries = scene.q if branch.queries is None else branch.queries.to(scene.q.dtype)
    queries = queries.masked_fill(scene.unseen_key, 0.0)
    width = scene.q.shape[-1]
    summary_query, summary_key = (pool_maximum(part, blocks) for part in (queries, scene.k))
    within = scene.score.rate_blocks(summary_query @ scene.k.mT, head_width=width).masked_fill(~member, NOTHING)
    values = softmax(within)[0] @ scene.v  # [B, H, N, D]
    earlier = blocks.earlier(scene.layout)[:, None]
    scores = scene.score.rate_blocks(scene.q @ summary_key.mT, head_width=width).masked_fill(~earlier, NOTHING)
    return Reading(scores, values)


def read_compressed(branch: Compressed, scene: Scene) -> Reading:
    """Every key of an earlier segment, weighed by its features; and a row of the matrix of keys that are gone."""
    heads, dtype, layout = scene.q.shape[1], scene.q.dtype, scene.layout
    keys = for_every_head(branch.keys.to(dtype).masked_fill(scene.unseen_key, 0.0), heads)
    blind = ~scene.visible.any(dim=3)[..., None]
    queries = branch.queries.to(dtype).masked_fill(blind, 0.0)
    query, key = layout.pair_places()
    read = scene.visible & (key < branch.earlier(query))[:, None]
    # A key as a query of the memory of the segments before its own.
    place, start = layout.key_place, layout.key_start
    earlier = (start[:, :, None] == start[:, None]) & (place[:, None] < branch.earlier(place)[:, :, None])
    earlier = (earlier & (start < layout.keys)[:, None])[:, None]
    past: tuple[Tensor, Tensor] | None = None
    if branch.past is not None:
        matrix, norm, begin, folded = branch.past.matrix, branch.past.norm, branch.past.start, branch.past.folded
        gone = (start == begin[:, None]) & (place < folded[:, None])
        read, earlier = read & ~gone[:, None, None], earlier & ~gone[:, None, None]
        past = for_every_head(matrix.to(dtype), heads), for_every_head(norm.to(dtype)[..., None], heads)
    scores = log_of_weights(queries @ keys.mT, read)
    values = scene.v
    if branch.delta:
        weights = (keys @ keys.mT).masked_fill(~earlier, 0.0)
        total, known = weights.sum(dim=-1, keepdim=True), torch.zeros_like(values)
        if past is not None:
            own = ((start == begin[:, None]) & (folded > 0)[:, None])[:, None, :, None]
            total = total + (keys @ past[1]).masked_fill(~own, 0.0)
            known = (keys @ past[0]).masked_fill(~own, 0.0)
        total = total.masked_fill(total == 0, 1.0)
        rows = torch.eye(weights.shape[-1], dtype=dtype, device=weights.device) + weights / total
        values = torch.linalg.solve_triangular(rows, values - known / total, upper=False)
    if past is None:
        return Reading(scores, values)
    # M is a row for every feature f: phi(q)_f z_f weighs M_f / z_f.
    own = (layout.start == begin[:, None]) & (folded > 0)[:, None] & (layout.query_place >= 0)
    rated = log_of_weights(queries * past[1].mT, own[:, None, :, None].expand(-1, heads, -1, queries.shape[-1]))
    kept = past[0] / past[1].masked_fill(past[1] == 0, 1.0)
    return Reading(torch.cat((scores, rated), dim=-1), torch.cat((values, kept), dim=-2))


def log_of_weights(weights: Tensor, read: Tensor) -> Tensor:
    """Scores whose softmax are the weights' shares, minus infinity where they are not read."""
    return weights.clamp(min=torch.finfo(weights.dtype).tiny).log().masked_fill(~read, NOTHING)


def pool_maximum(entries: Tensor, blocks: Blocks) -> Tensor:
    """The elementwise maximum [B, H, N, D] of the entries [B, H, S, D] of each block; 0 for an empty block."""
    count = blocks.first.shape[1]
    # Padding belongs to no block: it goes to one more, which is left out.
    number = torch.where(blocks.number >= 0, blocks.number, count)[:, None, :, None].expand_as(entries)
    nothing = entries.new_full((*entries.shape[:2], count + 1, entries.shape[3]), NOTHING)
    pooled = nothing.scatter_reduce(2, number, entries, "amax")[:, :, :count]
    return pooled.masked_fill(pooled == NOTHING, 0.0)
