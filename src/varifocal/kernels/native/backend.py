"""The native backend: a problem of the equation, taken apart into the kernels that serve it.

Branches of windows, prefixes and soft windows share one mixture kernel. A top-k is a selection and an attention over
what was selected; beside windows both share their gradients. Pair-gated scores and segments have kernels of their own.
Strided keys and random blocks are mixtures too, over keys in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from varifocal.equations.branches import (
    Branch,
    Causal,
    Cluster,
    Compressed,
    OwnBlock,
    Prefix,
    RandomBlocks,
    Segments,
    SoftWindow,
    Strided,
    TopK,
    Union,
    Window,
    members,
)
from varifocal.equations.branches.head_sizes import HeadSizes, each_head
from varifocal.equations.normalizers import Entmax, Polynomial, SinkLogit
from varifocal.equations.problem import (
    Asked,
    Attended,
    DivergenceProblem,
    PoolingProblem,
    Problem,
    Shortcuts,
    SummaryProblem,
)
from varifocal.equations.scores import DistanceBias, Dot, HeadScale, OwnFeatures, PairGate
from varifocal.kernels.native import abi, lanes, library
from varifocal.kernels.native.associations import own_segment, read_associations
from varifocal.kernels.native.clustered import ClusteredBranch, as_clustered, attend_clustered
from varifocal.kernels.native.combiner import attend_segments, summarize_full
from varifocal.kernels.native.entmax import attend_entmax
from varifocal.kernels.native.indexer import mean_divergence, why_no_divergence
from varifocal.kernels.native.inference import mixture_plainly
from varifocal.kernels.native.lanes import Places, Run, WindowAndTopKLane, WindowLane
from varifocal.kernels.native.mixture import (
    CAUSAL,
    MAX_BRANCHES,
    MixtureBranch,
    MixtureInputs,
    mixture_forward,
    mixture_inputs,
)
from varifocal.kernels.native.once import transformed
from varifocal.kernels.native.operator import runs_plainly
from varifocal.kernels.native.pair_gate import pair_gate
from varifocal.kernels.native.polynomial import attend_polynomial
from varifocal.kernels.native.relative_values import add_relative_values
from varifocal.kernels.native.scattered import ScatteredBranch, attend_scattered
from varifocal.kernels.native.select import select_blocks, select_exact, update_pooled
from varifocal.kernels.native.selected import SelectedInputs, selected_forward, selected_inputs
from varifocal.kernels.native.window_and_top_k import window_and_top_k

HONOURS = frozenset({
    *("q", "k", "v", "branches", "weights", "score", "layout", "normalizer", "shortcuts", "wants_logsumexp"),
    "relative_values",
    *("indexer", "selected", "top_k"),
    *("means", "keys", "block", "length"),
})  # fmt: skip
"""The parts of problems that these kernels know."""


def prepare(problem: Any) -> Callable[[], Any] | str:
    """What runs the problem, or why the native kernels cannot, as the end of a sentence."""
    if (missing := library.why_missing()) is not None:
        return f"is missing here: {missing}"
    if isinstance(problem, Problem):
        return prepare_attention(problem)
    if isinstance(problem, DivergenceProblem):
        return why_no_divergence(problem) or partial(mean_divergence, problem)
    if isinstance(problem, PoolingProblem):
        return why_not_on(problem.keys) or why_not_wide(problem.keys) or partial(pool, problem)
    if isinstance(problem, SummaryProblem):
        return why_not_on(problem.k) or partial(summarize, problem)
    return f"does not know the problem {type(problem).__name__}"


def why_not_on(x: Tensor) -> str | None:
    """Why the kernels cannot take a tensor; None if they can."""
    if x.device.type != "cpu":
        return f"runs on cpu tensors, got {x.device}"
    if x.dtype not in (torch.float32, torch.bfloat16):
        return f"runs float32 and bfloat16, got {x.dtype}"
    return None


def why_not_wide(x: Tensor, of: str = "heads") -> str | None:
    """Why the kernels cannot take rows [..., D]; None if they can."""
    if not 1 <= x.shape[-1] <= abi.MAX_WIDTH:
        return f"runs {of} of 1 to {abi.MAX_WIDTH} channels, got {x.shape[-1]}"
    return None


def why_not_sized(problem: Problem) -> str | None:
    """Why the kernels cannot take the sizes of a problem; None if they can."""
    if problem.q.shape[1] == 0:
        return "needs at least one query head, got none"
    if (reason := why_not_wide(problem.q)) is not None:
        return reason
    found = (member for branch in problem.branches for member in members(branch) if isinstance(member, TopK))
    for indexer in (member.indexer for member in found if member.indexer is not None):
        if (reason := why_not_wide(indexer.keys, "indexers")) is not None:
            return reason
    if isinstance(problem.score, PairGate) and not 1 <= (units := problem.score.output.shape[1]) <= abi.MAX_UNITS:
        return f"runs pair networks of 1 to {abi.MAX_UNITS} units, got {units}"
    return None


def pool(problem: PoolingProblem) -> None:
    """Adds new keys to the means of their blocks, in place."""
    position, start = problem.layout.ranges
    update_pooled(problem.means, problem.keys.detach(), position=position, start=start, block=problem.block)


def summarize(problem: SummaryProblem) -> Tensor:
    """Summary key and value [B, H, N, 2 D] of each segment."""
    return torch.cat(summarize_full(problem.q, problem.k, problem.v, length=problem.length), dim=-1)


@dataclass(frozen=True)
class TopKBranch:
    """A top-k, alone or with the query's own key beside it."""

    top_k: TopK
    include_self: bool


Kind = MixtureBranch | TopKBranch | ScatteredBranch | ClusteredBranch | Segments
"""What the kernels make of a branch."""


def prepare_attention(problem: Problem) -> Callable[[], Attended] | str:
    """What runs a problem, and answers in the type of its queries."""
    found = prepare_kernels(problem)
    if isinstance(found, str) or not torch.is_autocast_enabled("cpu"):
        return found

    def run() -> Attended:
        # Under autocast the operators see float32, whatever comes in.
        attended = found()
        return attended._replace(output=attended.output.to(problem.q.dtype))

    return run


def prepare_kernels(problem: Problem) -> Callable[[], Attended] | str:
    """Classify the branches of a problem, once, and find the kernels that serve them."""
    if (reason := why_not_on(problem.q) or why_not_sized(problem)) is not None:
        return reason
    if not torch.compiler.is_compiling() and transformed():
        return "takes no part in forward-mode derivatives and the transforms of torch.func"
    if problem.normalizer is not None and not isinstance(problem.normalizer, SinkLogit | Entmax | Polynomial):
        return f"has no kernel for the normalizer {type(problem.normalizer).__name__}"
    if any(isinstance(branch, OwnBlock | Compressed) for branch in problem.branches):
        return prepare_segments(problem)
    kinds: list[Kind] = []
    for branch in problem.branches:
        kind = kind_of(branch, problem.q.shape[1])
        if kind is None:
            return f"has no kernel for the branch {type_names(branch)}"
        kinds.append(kind)
    mixes = not isinstance(problem.score, PairGate) and all(isinstance(kind, MixtureBranch) for kind in kinds)
    if isinstance(problem.normalizer, Polynomial):
        return prepare_polynomial(problem, kinds, problem.normalizer)
    if isinstance(problem.normalizer, Entmax):
        return prepare_entmax(problem, kinds, problem.normalizer)
    if problem.normalizer is not None and not mixes:
        return "has sink logits over branches of windows and prefixes only, without a gate of pairs"
    if isinstance(problem.score, PairGate):
        if problem.relative_values is not None:
            return "adds relative values beside plain scores and biases by distance only"
        windows = [kind for kind in kinds if isinstance(kind, MixtureBranch)]
        if not len(kinds) == len(windows) <= MAX_BRANCHES:
            return f"gates pairs over up to {MAX_BRANCHES} branches of windows and prefixes only"
        return partial(attend_pair_gate, problem, problem.score, windows)
    if isinstance(problem.score, DistanceBias) and not all(isinstance(kind, MixtureBranch) for kind in kinds):
        return "adds a bias by distance over branches of windows and prefixes only"
    if isinstance(problem.score, HeadScale) and not torch.compiler.is_compiling():
        if bool((problem.score.scale == 0).any()):
            return "needs a scale other than 0 in every head, to find its gradient"
    elif not isinstance(problem.score, Dot | HeadScale | DistanceBias):
        return f"has no kernel for the score {type(problem.score).__name__}"
    if sum(isinstance(kind, MixtureBranch) for kind in kinds) > MAX_BRANCHES:
        return f"mixes at most {MAX_BRANCHES} branches of windows"
    if problem.relative_values is not None:
        only = kinds[0]
        if len(kinds) > 1 or not isinstance(only, MixtureBranch) or problem.normalizer is not None:
            return "adds relative values to one softmax over a window or every key, without a sink logit"
        if only.width is not None or not isinstance(only.window, int) or only.prefix != 0:
            return "adds relative values over one window for all heads, or every key, without a prefix"
        return partial(attend_with_relative_values, problem, only, problem.relative_values)
    if isinstance(problem.normalizer, SinkLogit):
        return partial(attend_with_sink, problem, kinds, problem.normalizer)  # type: ignore[arg-type]
    return partial(attend_native, problem, kinds)


def prepare_segments(problem: Problem) -> Callable[[], Attended] | str:
    """Segments and what is remembered of those before them: each branch by itself, mixed afterwards."""
    if problem.normalizer is not None or problem.relative_values is not None:
        return "has segments of plain softmax only, without relative values"
    runs: list[Callable[[], Attended]] = []
    for branch in problem.branches:
        found = prepare_alone(replace(problem, branches=(branch,), weights=None))
        if isinstance(found, str):
            return found
        runs.append(found)

    def run() -> Attended:
        answers = [one() for one in runs]
        total: Tensor | None = None
        for number, answer in enumerate(answers):
            output = answer.output.float()
            if problem.weights is not None:
                output = output * problem.weights[..., number, None].float()
            total = output if total is None else total + output
        assert total is not None
        selected = tuple(one for answer in answers for one in answer.selected)
        return Attended(total.to(problem.q.dtype), torch.cat([one.logsumexp for one in answers], dim=-1), selected)

    return run


def prepare_alone(problem: Problem) -> Callable[[], Attended] | str:
    """One branch: the query's own segment, what is remembered of those before it, or any other."""
    (branch,), score = problem.branches, problem.score
    if isinstance(branch, Compressed):

        def read() -> Attended:
            output, logsumexp = read_associations(branch, problem.v, problem.layout)
            return Attended(output, logsumexp[..., None], (None,))

        return read
    if not isinstance(branch, OwnBlock):
        return prepare_kernels(problem)
    alone = replace(problem, branches=(Causal(),), layout=own_segment(problem.layout, branch.length), shortcuts=None)
    if isinstance(score, OwnFeatures):
        if score.keys.shape != problem.k.shape:
            return "has segments of the scores OwnFeatures for features as wide as the heads only"
        alone = replace(alone, q=score.queries.float(), k=score.keys.float(), v=problem.v.float(), score=Dot(1.0))
    return prepare_kernels(alone)


def prepare_polynomial(problem: Problem, kinds: Sequence[Kind], polynomial: Polynomial) -> Callable[[], Attended] | str:
    """A polynomial of scores in place of their exponentials, over every key."""
    score = problem.score
    if tuple(kinds) != (MixtureBranch(window=CAUSAL),) or problem.relative_values is not None:
        return "has polynomials of scores over every key only, in one branch"
    if not isinstance(score, OwnFeatures):
        return "has polynomials of the scores OwnFeatures only"

    def run() -> Attended:
        output = attend_polynomial(
            score.queries, score.keys, problem.v, order=polynomial.order, layout=problem.layout
        ).to(problem.q.dtype)
        if problem.weights is not None:
            output = output * problem.weights.to(output.dtype)
        # A polynomial has no logsumexp; what there is of one is nobody's business.
        return Attended(output, output.new_zeros(*output.shape[:3], 1, dtype=torch.float32), (None,))

    return run


def prepare_entmax(problem: Problem, kinds: Sequence[Kind], entmax: Entmax) -> Callable[[], Attended] | str:
    """One branch of a window and a prefix under entmax in place of softmax."""
    only = kinds[0]
    if len(kinds) > 1 or not isinstance(only, MixtureBranch) or only.width is not None:
        return "has entmax over one branch of windows and prefixes only"
    if not isinstance(only.window, int) or not isinstance(only.prefix, int):
        return "has entmax over windows and prefixes that are the same in all heads only"
    if not isinstance(problem.score, Dot | HeadScale) or problem.relative_values is not None:
        return "has entmax of plain scores only, without relative values"

    def run() -> Attended:
        output, logsumexp = attend_entmax(
            problem.q, problem.k, problem.v, branch=only, alpha=entmax.alpha, layout=problem.layout,
            scale=scale_of(problem), wants_logsumexp=problem.wants_logsumexp,
        )  # fmt: skip
        if problem.weights is not None:
            output = output * problem.weights.to(output.dtype)
        return Attended(output, logsumexp[..., None], (None,))

    return run


def kind_of(branch: Branch, heads: int) -> Kind | None:
    """What the kernels make of a branch; None if they have nothing for it."""
    if isinstance(branch, Segments):
        return branch
    return as_mixture(branch) or as_scattered(branch) or as_top_k(branch) or of_clusters(branch, heads)


def recall(asked: Asked) -> Run | None:
    """What runs a call at once, because one of its kind was run before."""
    return lanes.lane_of(lanes.key_of(asked))


def learn(asked: Asked) -> None:
    """Remember the kind of a call that has just been run."""
    key = lanes.key_of(asked)
    if key is not None and lanes.lane_of(key) is None and (run := lane_for(asked)) is not None:
        lanes.keep(key, run)


def lane_for(asked: Asked) -> Run | None:
    """What runs calls of the kind of one that has just been run; None where the general way is the only one."""
    if why_not_wide(asked.q) is not None:
        return None
    kinds = [kind_of(branch, asked.q.shape[1]) for branch in asked.branches]
    windows = [kind for kind in kinds if isinstance(kind, MixtureBranch)]
    tops = [kind for kind in kinds if isinstance(kind, TopKBranch)]
    if len(windows) == len(kinds) <= MAX_BRANCHES:
        places = Places(asked.q.shape[0], asked.q.shape[2])
        return WindowLane(asked, windows, weighted=asked.weights is not None, places=places)
    assert isinstance(asked.score, Dot)
    ranked_as_read = asked.score.factor(asked.q.shape[3]) > 0
    if len(kinds) != 2 or not windows or not tops or asked.weights is None or not ranked_as_read:
        return None
    top_k, means = tops[0].top_k, None if asked.shortcuts is None else asked.shortcuts.block_means
    if top_k.block > LONGEST_BLOCK or (means is not None and means.shape[2] * top_k.block < asked.k.shape[2]):
        return None
    return WindowAndTopKLane(
        asked, windows[0], top_k, include_self=tops[0].include_self, window_first=isinstance(kinds[0], MixtureBranch)
    )


LONGEST_BLOCK = 1 << 20
"""Of the blocks that a lane selects: their size is an int32 in C, and nobody decodes with longer ones."""


def scale_of(problem: Problem) -> Tensor | float:
    """The factor of the dot products: a number, or [H]."""
    width = problem.q.shape[-1]
    if isinstance(problem.score, Dot):
        return problem.score.factor(width)
    if isinstance(problem.score, DistanceBias):
        return float(width**-0.5)
    assert isinstance(problem.score, HeadScale)
    scale: Tensor = problem.score.scale.float() * width**-0.5
    return scale


def attend_native(problem: Problem, kinds: Sequence[Kind]) -> Attended:
    """Evaluate a problem whose branches were classified."""
    scale = scale_of(problem)
    if all(isinstance(kind, MixtureBranch) for kind in kinds):
        # Most calls, and every decoded token of most models: one kernel, and nothing to put together.
        if (found := attend_plainly(problem, kinds, scale)) is not None:  # type: ignore[arg-type]
            return found
        made = mixture_forward(mix(problem, dict(enumerate(kinds)), scale))  # type: ignore[arg-type]
        return Attended(made.out, made.logsumexp.detach(), (None,) * len(kinds))
    windows: dict[int, MixtureBranch] = {}
    selections: dict[int, SelectedInputs] = {}
    parts: list[Tensor] = []
    logsumexp: list[Tensor | None] = [None] * len(kinds)
    for number, kind in enumerate(kinds):
        if isinstance(kind, MixtureBranch):
            windows[number] = kind
            continue
        weight = None if problem.weights is None else problem.weights[..., number]
        if isinstance(kind, TopKBranch):
            selections[number] = select(problem, kind, scale, weight)
        else:
            if isinstance(kind, ScatteredBranch):
                output, logsumexp[number] = attend_scattered(
                    problem.q, problem.k, problem.v, branch=kind, layout=problem.layout, scale=scale
                )
            elif isinstance(kind, ClusteredBranch):
                output, logsumexp[number] = attend_clustered(
                    problem.q, problem.k, problem.v, branch=kind, layout=problem.layout, scale=scale
                )
            else:
                output, logsumexp[number] = attend_segments(
                    problem.q, problem.k, problem.v,
                    queries=kind.queries, length=kind.length, layout=problem.layout, scale=scale,
                    summaries=shortcuts_of(problem).segment_summaries,
                )  # fmt: skip
            parts.append(output if weight is None else output * weight[..., None].to(output.dtype))
    if windows:
        mixed = mix(problem, windows, scale)
        if len(selections) == 1:
            (only,) = selections
            output, window_lse, logsumexp[only] = window_and_top_k(mixed, selections[only])
        else:
            output, window_lse, _, _ = mixture_forward(mixed)
        parts.append(output)
        for place, number in enumerate(windows):
            logsumexp[number] = window_lse[..., place].detach()
    for number, selection in selections.items():
        if logsumexp[number] is None:
            read = selected_forward(selection)
            parts.append(read.output)
            logsumexp[number] = read.logsumexp.detach()
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    selected: list[Tensor | None] = [None] * len(kinds)
    for number, selection in selections.items():
        groups = problem.q.shape[1] // max(selection.selected.shape[1], 1)
        selected[number] = selection.selected if groups == 1 else selection.selected.repeat_interleave(groups, dim=1)
    return Attended(total, torch.stack([one for one in logsumexp if one is not None], dim=-1), tuple(selected))


def attend_with_sink(problem: Problem, kinds: Sequence[MixtureBranch], sink: SinkLogit) -> Attended:
    """Windows whose softmax has a sink: what it leaves of a branch follows from the branch's own logsumexp.

    Each branch is a pass of its own, since its share is known only after it.
    """
    scale = scale_of(problem)
    total: Tensor | None = None
    logsumexps = []
    for number, kind in enumerate(kinds):
        alone = replace(problem, branches=(problem.branches[number],), weights=None, wants_logsumexp=True)
        plain = attend_plainly(alone, [kind], scale)
        made = mixture_forward(mix(alone, {0: kind}, scale)) if plain is None else plain
        output, logsumexp = made[0], made[1][..., 0]
        share = sink.share(logsumexp)
        if problem.weights is not None:
            share = share * problem.weights[..., number].to(share.dtype)
        part = output.to(share.dtype) * share[..., None]
        total = part if total is None else total + part
        logsumexps.append(logsumexp.detach())
    assert total is not None
    return Attended(total.to(problem.q.dtype), torch.stack(logsumexps, dim=-1), (None,) * len(kinds))


def attend_with_relative_values(problem: Problem, kind: MixtureBranch, rows: Tensor) -> Attended:
    """One softmax over a window, whose values are moved by their distance."""
    scale = scale_of(problem)
    made = mixture_forward(mix(problem, {0: kind}, scale))
    assert isinstance(kind.window, int)
    output = add_relative_values(
        made.out, made.logsumexp[..., 0],
        q=problem.q, k=problem.k, rows=rows, scale=scale, window=kind.window, layout=problem.layout,
        table=problem.score.table if isinstance(problem.score, DistanceBias) else None,
    )  # fmt: skip
    if problem.weights is not None:
        # The mixture has weighed its own part already.
        output = made.out + (output - made.out) * problem.weights.to(output.dtype)
    return Attended(output, made.logsumexp.detach(), (None,))


def attend_plainly(problem: Problem, branches: Sequence[MixtureBranch], scale: Tensor | float) -> Attended | None:
    """The same on the shortest way; None where it does not lead."""
    q, k, v, weights = problem.q, problem.k, problem.v, problem.weights
    if not isinstance(problem.score, Dot) or any(branch.width is not None for branch in branches):
        return None
    if not isinstance(scale, float) or not runs_plainly((q, k, v, weights)):
        return None
    position, start = problem.layout.ranges
    output, logsumexp = mixture_plainly(
        q, k, v, branches=branches, weights=weights, position=position, start=start, scale=scale,
        skip_closed=not problem.wants_logsumexp,
    )  # fmt: skip
    return Attended(output, logsumexp, (None,) * len(branches))


def shortcuts_of(problem: Problem) -> Shortcuts:
    """What a memory kept for the problem."""
    return Shortcuts() if problem.shortcuts is None else problem.shortcuts


def as_mixture(branch: Branch) -> MixtureBranch | None:
    """The branch as the mixture kernel takes it; None if it has a member of another kind."""
    window: int | Tensor = 0
    prefix: int | Tensor = 0
    soft = None
    for member in members(branch):
        if isinstance(member, Causal):
            window = CAUSAL
        elif isinstance(member, Window):
            window = larger(window, sizes_of(member.size))
        elif isinstance(member, Prefix):
            prefix = larger(prefix, sizes_of(member.size))
        elif isinstance(member, SoftWindow) and soft is None:
            soft = member
        else:
            return None
    if soft is None:
        return MixtureBranch(window=window, prefix=prefix)
    return MixtureBranch(
        window=window, prefix=prefix, width=soft.width, edge=float(soft.edge), limit=min(soft.limit, CAUSAL)
    )


def as_scattered(branch: Branch) -> ScatteredBranch | None:
    """The branch as one kind of scattered keys beside a window and a prefix of all heads; None if it is no such."""
    found = {member for member in members(branch) if isinstance(member, Strided | RandomBlocks)}
    others = [member for member in members(branch) if member not in found]
    if len(found) != 1:
        return None
    near = as_mixture(Union(tuple(others))) if others else MixtureBranch()
    if near is None or near.width is not None or not isinstance(near.window, int) or not isinstance(near.prefix, int):
        return None
    return ScatteredBranch(near, found.pop())


def of_clusters(branch: Branch, heads: int) -> ClusteredBranch | None:
    """The branch as a cluster, alone or beside the windows of other heads; None if it is anything else."""
    found = [member for member in members(branch) if isinstance(member, Cluster)]
    others = [member for member in members(branch) if not isinstance(member, Cluster)]
    if len(found) != 1 or len(others) > 1:
        return None
    windows = [0] * heads
    if others:
        near = others[0]
        if not isinstance(near, Window):
            return None
        windows = each_head(near.size) if isinstance(near.size, tuple) else [min(near.size, CAUSAL)] * heads
    return as_clustered(found[0], tuple(windows))


def sizes_of(sizes: HeadSizes) -> int | Tensor:
    """A size as the kernels take it: a number, or int32 [H]."""
    return torch.tensor(each_head(sizes), dtype=torch.int32) if isinstance(sizes, tuple) else min(sizes, CAUSAL)


def larger(one: int | Tensor, other: int | Tensor) -> int | Tensor:
    """The larger of two sizes, head by head."""
    if isinstance(one, int) and isinstance(other, int):
        return max(one, other)
    return torch.maximum(*(torch.as_tensor(size, dtype=torch.int32) for size in (one, other)))


def as_top_k(branch: Branch) -> TopKBranch | None:
    """The branch as a top-k, alone or joined with Window(1); None if it is anything else."""
    found = [member for member in members(branch) if isinstance(member, TopK)]
    others = [member for member in members(branch) if not isinstance(member, TopK)]
    if len(found) != 1 or any(other != Window(1) for other in others):
        return None
    # The own block is always read whole, so the own key needs no mention there.
    return TopKBranch(found[0], include_self=bool(others) and found[0].select == "exact")


def mix(problem: Problem, windows: dict[int, MixtureBranch], scale: Tensor | float) -> MixtureInputs:
    """The mixture of a problem's windows, by their numbers."""
    weights = problem.weights
    if weights is not None and len(windows) < len(problem.branches):
        first = next(iter(windows))
        # A slice where there can be one: a list of numbers takes torch five times as long.
        weights = weights[..., first : first + 1] if len(windows) == 1 else weights[..., list(windows)]
    position, start = problem.layout.ranges
    return mixture_inputs(
        problem.q, problem.k, problem.v, branches=list(windows.values()), weights=weights,
        position=position, start=start, scale=scale,
        bias_table=problem.score.table if isinstance(problem.score, DistanceBias) else None,
        skip_closed=not problem.wants_logsumexp,
    )  # fmt: skip


def select(problem: Problem, branch: TopKBranch, scale: Tensor | float, weight: Tensor | None) -> SelectedInputs:
    """Select the keys or blocks of a top-k branch, and what attention over them takes."""
    top_k = branch.top_k
    q, k = problem.q, problem.k
    if top_k.indexer is not None:
        q, k = (part.detach().float() for part in (top_k.indexer.queries, top_k.indexer.keys))
    elif isinstance(scale, Tensor) or scale <= 0:
        # Keys are ranked by their scores: a negative scale turns the order of dot products around, 0 makes all equal.
        q = q.detach() * torch.as_tensor(scale).detach().sign().to(q.dtype).view(-1, 1, 1)
    place = problem.layout.query_place
    position, start = problem.layout.ranges
    if top_k.select == "exact":
        budget = top_k.keys_per_query(place).int()
        found = select_exact(q, k, position=position, start=start, budget=budget, capacity=top_k.most_keys(k.shape[2]))
    else:
        budget = top_k.blocks_per_query(place).int()
        found = select_blocks(
            q, k, position=position, start=start, budget=budget, block=top_k.block,
            pooled=shortcuts_of(problem).block_means, capacity=top_k.most_blocks(k.shape[2]),
        )  # fmt: skip
    return selected_inputs(
        problem.q, problem.k, problem.v, found,
        position=position, start=start, block=top_k.block if top_k.select == "blocks" else None,
        include_self=branch.include_self, weights=weight, scale=scale,
    )  # fmt: skip


def attend_pair_gate(problem: Problem, score: PairGate, branches: list[MixtureBranch]) -> Attended:
    """Branches of windows and prefixes under pair-gated scores."""
    position, start = problem.layout.ranges
    several = len(branches) > 1
    result = pair_gate(
        problem.q, problem.k, problem.v, score.queries, score.keys,
        output=score.output, bias=score.bias, scale=score.scale, form=score.form, threshold=score.threshold,
        position=position, start=start, branches=branches, weights=problem.weights if several else None,
        skip_closed=not problem.wants_logsumexp,
    )  # fmt: skip
    output = result.output
    if problem.weights is not None and not several:
        output = output * problem.weights.to(output.dtype)
    return Attended(output, result.logsumexp, (None,) * len(branches))


def type_names(branch: Branch) -> str:
    """The branch's kinds, for messages: "Window | Strided"."""
    return " | ".join(type(member).__name__ for member in members(branch))
