"""The flex backend: a problem of the equation, taken apart into readings, each one call of FlexAttention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from varifocal.equations.branches import (
    Branch,
    FixedBranch,
    RandomBlocks,
    Segments,
    SoftWindow,
    TopK,
    members,
)
from varifocal.equations.divergence import indexer_divergence
from varifocal.equations.equation import Equation
from varifocal.equations.layout import Layout
from varifocal.equations.normalizers import SinkLogit
from varifocal.equations.pooling import pool_keys, summarize
from varifocal.equations.problem import (
    Attended,
    DivergenceProblem,
    PoolingProblem,
    Problem,
    SummaryProblem,
    accumulation_dtype,
)
from varifocal.equations.scores import DistanceBias, Dot, HeadScale, PairGate, Score
from varifocal.kernels.flex.compiled import attend_compiled, mix_compiled
from varifocal.kernels.flex.joining import Joined, Part, join
from varifocal.kernels.flex.key_sets import Drawn, EarlierSummaries, KeySet, Pattern, Soft, by_head, differs_by_head
from varifocal.kernels.flex.nesting import chain, fixed_members, rings
from varifocal.kernels.flex.pair_scores import pair_score
from varifocal.kernels.flex.reading import Reading
from varifocal.kernels.flex.selection import capacity, listed, select
from varifocal.kernels.flex.summaries import summarise

TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Executor(Protocol):
    """Evaluates a reading."""

    def __call__(self, reading: Reading, *, at_end: bool) -> tuple[Tensor, Tensor]:
        """The output [B, H, T, D] and the logsumexp [B, H, T]; `at_end` if the queries are known to be the last
        ones of one document."""


class Mixer(Protocol):
    """Evaluates `joining.mix`."""

    def __call__(self, means: tuple[Tensor, ...], factors: tuple[Tensor | None, ...], dtype: torch.dtype) -> Tensor: ...


HONOURS = frozenset({
    *("q", "k", "v", "branches", "weights", "score", "layout", "normalizer", "shortcuts", "wants_logsumexp"),
    *("indexer", "selected", "top_k"),
    *("means", "keys", "block", "length"),
})  # fmt: skip
"""The parts of problems that are known here; shortcuts are for a cache on a CPU and do without."""


def prepare(problem: Any) -> Callable[[], Any] | str:
    """What runs the problem, or why FlexAttention cannot, as the end of a sentence."""
    if isinstance(problem, Problem):
        return why_not(problem) or partial(attend_flex, problem)
    # What attention does not need is written in plain torch, for any device.
    if isinstance(problem, DivergenceProblem):
        return partial(indexer_divergence, problem)
    if isinstance(problem, PoolingProblem):
        return partial(pool_keys, problem)
    if isinstance(problem, SummaryProblem):
        return partial(summarize, problem)
    return f"does not know the problem {type(problem).__name__}"


def why_not(problem: Problem) -> str | None:
    """Why FlexAttention cannot evaluate a problem, as the end of a sentence; None if it can."""
    if (reason := why_not_equation(problem)) is not None:
        return reason
    if problem.q.device.type not in ("cuda", "cpu"):
        return f"runs on cuda and cpu tensors, got {problem.q.device}"
    if problem.q.dtype not in TYPES:
        return f"runs float32, bfloat16 and float16, got {problem.q.dtype}"
    if problem.q.device.type == "cpu":
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in learning(problem)):
            return "has no backward on a CPU, where torch.no_grad() lets it run for checking outputs"
        if not torch.cpu._is_avx2_supported():
            return "needs a processor with AVX2, or a GPU"
    return None


def why_not_equation(problem: Problem | Equation) -> str | None:
    """Why FlexAttention cannot evaluate branches, score or normalizer of a problem, on any device."""
    if problem.normalizer is not None and not isinstance(problem.normalizer, SinkLogit):
        return f"has no kernel for the normalizer {type(problem.normalizer).__name__}"
    if not isinstance(problem.score, Dot | HeadScale | PairGate | DistanceBias):
        return f"has no kernel for the score {type(problem.score).__name__}"
    if isinstance(problem.score, PairGate) and problem.score.output.shape[1] == 0:
        return "needs a pair network of at least one unit, got none"
    for member in (member for branch in problem.branches for member in members(branch)):
        if not isinstance(member, FixedBranch | SoftWindow | Segments | TopK):
            return f"has no kernel for the branch {type(member).__name__}"
    return None


def learning(problem: Problem) -> Iterator[Tensor]:
    """The tensors of a problem that pass through kernels and may ask for gradients."""
    yield from (problem.q, problem.k, problem.v)
    for member in (member for branch in problem.branches for member in members(branch)):
        if isinstance(member, SoftWindow):
            yield member.width
        elif isinstance(member, Segments) and member.queries is not None:
            yield member.queries
    yield from (value for value in vars(problem.score).values() if isinstance(value, Tensor))
    if isinstance(problem.normalizer, SinkLogit):
        yield problem.normalizer.logit


def attend_flex(problem: Problem, *, execute: Executor = attend_compiled, mix: Mixer = mix_compiled) -> Attended:
    """Evaluate a problem with FlexAttention, or with another executor of the same readings."""
    device = problem.q.device.type
    dtype = problem.q.dtype
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        if problem.q.numel() == 0:
            return nothing(problem)
        scene = make_scene(problem, dtype)
        found = read_all(problem.branches, scene, execute)
        joined = [join([found.parts[number].logsumexp for number in own]) for own in found.of_branch]
        means = tuple(part.mean for part in found.parts)
        output = mix(means, factors_of(problem, found, joined, dtype=scene.dtype), problem.q.dtype)
        logsumexp = torch.stack([one.logsumexp.detach() for one in joined], dim=-1)
        return Attended(output, logsumexp, tuple(found.selected))


def factors_of(
    problem: Problem, found: Found, joined: list[Joined], *, dtype: torch.dtype
) -> tuple[Tensor | None, ...]:
    """How often each part counts in the output, [B, H, T] of the given type: over all branches that read it."""
    factors: list[Tensor | None] = [None] * len(found.parts)
    for number, (own, one) in enumerate(zip(found.of_branch, joined, strict=True)):
        of_branch: list[Tensor] = []
        if isinstance(problem.normalizer, SinkLogit):
            of_branch.append(problem.normalizer.share(one.logsumexp))
        if problem.weights is not None:
            of_branch.append(problem.weights[..., number].to(dtype))
        for place, share in zip(own, one.shares, strict=True):
            product: Tensor | None = None
            for factor in (*of_branch, *(() if share is None else (share,))):
                product = factor if product is None else product * factor
            before = factors[place]
            factors[place] = product if before is None or product is None else before + product
    return tuple(factors)


def nothing(problem: Problem) -> Attended:
    """The answer where there are no queries."""
    shape = problem.q.shape[:3]
    keys = problem.k.shape[2]
    selections: list[Tensor | None] = []
    for branch in problem.branches:
        found = [member for member in members(branch) if isinstance(member, TopK)]
        width = capacity(found[0], keys) if found else 0
        empty = torch.empty(*shape, width, dtype=torch.int32, device=problem.q.device)
        selections.append(empty if found else None)
    logsumexp = problem.q.new_empty(*shape, len(problem.branches), dtype=accumulation_dtype(problem.q.dtype))
    # It still hangs on whatever learns: the gradient of nothing is 0, and no error.
    hold = sum((part[:0].sum() for part in learning(problem)), problem.q.new_zeros(()))
    return Attended(torch.zeros_like(problem.q) + hold, logsumexp, tuple(selections))


@dataclass(frozen=True, eq=False)
class Scene:
    """What all readings of a problem share; entries that nobody sees are blanked."""

    q: Tensor
    """[B, H, T, D]."""
    k: Tensor
    """[B, G, S, D]."""
    v: Tensor
    """[B, G, S, D]."""
    score: Score
    """Prepared: in the type of the scores."""
    layout: Layout
    unseen: Tensor
    """bool [B, 1, S, 1]: keys that no query may see."""
    position: Tensor
    """int32 [B, T]."""
    start: Tensor
    """int32 [B, T]."""
    block_means: Tensor | None
    """What a memory keeps of the blocks that a top-k ranks."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of scores, weights and sums."""
        return accumulation_dtype(self.q.dtype)

    @property
    def at_end(self) -> bool:
        """Whether the queries are known to be the last ones of one document."""
        return self.layout.one_document and self.layout.at_end

    def reading(self, sets: tuple[KeySet, ...]) -> Reading:
        """A reading of this scene's keys."""
        rule = pair_score(self.score, head_width=self.q.shape[-1], queries=self.q.shape[2])
        return Reading(self.q, self.k, self.v, self.position, self.start, sets, rule)


def make_scene(problem: Problem, dtype: torch.dtype) -> Scene:
    """Give all parts their types, and blank what nobody sees: padding may hold anything, even NaN."""
    layout = problem.layout
    q, k, v = (part.to(dtype) for part in (problem.q, problem.k, problem.v))
    blind = (layout.start > layout.position)[:, None, :, None]  # [B, 1, T, 1]
    unseen = ~seen_keys(layout)[:, None, :, None]  # [B, 1, S, 1]
    # One document without padding, read to its end: every key is seen, and there is nothing to blank.
    if not (layout.one_document and layout.at_end):
        q, k, v = q.masked_fill(blind, 0.0), k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
    score = problem.score.prepare(accumulation_dtype(dtype), blind, unseen)
    means = None if problem.shortcuts is None else problem.shortcuts.block_means
    return Scene(q, k, v, score, layout, unseen, *layout.ranges, means)


def seen_keys(layout: Layout) -> Tensor:
    """bool [B, S]: the keys that some query may see, those up to the last query of each document."""
    batch, keys = layout.key_start.shape
    reach = torch.full((batch, keys + 1), -1, device=layout.start.device)
    # Documents are named by their start; the start of padding is S, hence one entry more than keys.
    reach = reach.scatter_reduce(1, layout.start, layout.position, "amax")
    index = torch.arange(keys, device=reach.device)
    return (index >= layout.key_start) & (index <= reach.gather(1, layout.key_start))


@dataclass(frozen=True, eq=False)
class Found:
    """What was read for the branches of a problem."""

    parts: list[Part]
    """What each reading gave; a part may belong to several branches."""
    of_branch: list[tuple[int, ...]]
    """The numbers of each branch's parts, without common keys: together they are the branch's own softmax."""
    selected: list[Tensor | None]
    """By branch."""


def read_all(branches: tuple[Branch, ...], scene: Scene, execute: Executor) -> Found:
    """Every branch's own softmax; branches inside each other share their readings."""
    parts: list[Part] = []
    of_branch: dict[int, tuple[int, ...]] = {}
    selections: list[Tensor | None] = [None] * len(branches)
    nested = chain(branches)
    if nested is not None:
        fixed = [fixed_members(branches[number]) or () for number in nested]
        for number, ring in zip(nested, rings(fixed), strict=True):
            parts.append(run(scene.reading((ring,)), scene, execute))
            of_branch[number] = tuple(range(len(parts)))
    for number, branch in enumerate(branches):
        if number not in of_branch:
            more, selections[number] = read(branch, scene, execute)
            of_branch[number] = tuple(range(len(parts), len(parts) + len(more)))
            parts += more
    return Found(parts, [of_branch[number] for number in range(len(branches))], selections)


def read(branch: Branch, scene: Scene, execute: Executor) -> tuple[list[Part], Tensor | None]:
    """Parts that make one softmax over all that a branch reads, and what its top-k (if it has one) selected."""
    fixed: list[FixedBranch] = []
    by_heads: list[FixedBranch] = []
    sets: list[KeySet] = []
    found: Tensor | None = None
    for member in members(branch):
        if isinstance(member, TopK):
            selected = select(member, scene.q, scene.k, scene.score, scene.layout, scene.block_means)
            found = listed(selected, member, scene.k.shape[2])
            sets.append(selected)
        elif isinstance(member, SoftWindow):
            width = member.width.to(scene.dtype)
            sets.append(Soft(member, width, width.detach()))
        elif isinstance(member, RandomBlocks):
            draws = member.draws(scene.layout.query_place)
            sets.append(Drawn(member, tuple(draw.int() for draw in draws)))
        elif isinstance(member, Segments):
            fixed.append(member.own)
        elif isinstance(member, FixedBranch):
            (by_heads if differs_by_head(member) else fixed).append(member)
    if by_heads:
        sets.insert(0, by_head(by_heads, scene.q.shape[1], scene.q.device))
    if fixed:
        sets.insert(0, Pattern(tuple(fixed)))
    parts = [run(scene.reading(tuple(sets)), scene, execute)]
    for member in members(branch):
        if isinstance(member, Segments):
            parts += read_summaries(member, scene, execute)
    return parts, found


def read_summaries(branch: Segments, scene: Scene, execute: Executor) -> list[Part]:
    """The softmax over the summaries of earlier segments; nothing if there are none."""
    queries = scene.q if branch.queries is None else branch.queries.masked_fill(scene.unseen, 0.0)
    wide = (part.to(scene.dtype) for part in (queries, scene.k, scene.v))
    summaries = summarise(*wide, length=branch.length, score=scene.score, layout=scene.layout)
    if summaries is None:
        return []
    keys, values = (part.to(scene.q.dtype) for part in (summaries.keys, summaries.values))
    rule = pair_score(scene.score, head_width=scene.q.shape[-1], queries=scene.q.shape[2])
    sets = (EarlierSummaries(summaries.first, branch.own),)
    return [run(Reading(scene.q, keys, values, scene.position, scene.start, sets, rule), scene, execute)]


def run(reading: Reading, scene: Scene, execute: Executor) -> Part:
    """A reading, evaluated."""
    return Part(*execute(reading, at_end=scene.at_end))
