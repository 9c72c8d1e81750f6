"""The native backend: a problem of the equation, taken apart into the kernels that serve it.

Branches of windows, prefixes and soft windows share one mixture kernel. A top-k is a selection and an attention over
what was selected; beside windows both share their gradients. Pair-gated scores and segments have kernels of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from varifocal.equations.branches import Branch, Causal, Prefix, Segments, SoftWindow, TopK, Window, members
from varifocal.equations.problem import Attended, Problem
from varifocal.equations.scores import Dot, HeadScale, PairGate
from varifocal.kernels.native import library
from varifocal.kernels.native.combiner import attend_segments
from varifocal.kernels.native.mixture import (
    CAUSAL,
    MAX_BRANCHES,
    MixtureBranch,
    MixtureInputs,
    mixture_forward,
    mixture_inputs,
)
from varifocal.kernels.native.pair_gate import pair_gate
from varifocal.kernels.native.select import select_blocks, select_exact
from varifocal.kernels.native.selected import SelectedInputs, selected_forward, selected_inputs
from varifocal.kernels.native.window_and_top_k import window_and_top_k


def why_not(problem: Problem) -> str | None:
    """Why the native kernels cannot evaluate a problem, as the end of a sentence; None if they can."""
    if (missing := library.why_missing()) is not None:
        return f"is missing here: {missing}"
    if problem.q.device.type != "cpu":
        return f"runs on cpu tensors, got {problem.q.device}"
    if problem.q.dtype not in (torch.float32, torch.bfloat16):
        return f"runs float32 and bfloat16, got {problem.q.dtype}"
    if problem.q.shape[1] == 0:
        return "needs at least one query head, got none"
    for branch in problem.branches:
        if as_mixture(branch) is None and as_top_k(branch) is None and not isinstance(branch, Segments):
            return f"has no kernel for the branch {type_names(branch)}"
    if isinstance(problem.score, PairGate):
        only = as_mixture(problem.branches[0]) if len(problem.branches) == 1 else None
        if only is None or only.width is not None:
            return "gates pairs over one branch of windows and prefixes only"
    elif isinstance(problem.score, HeadScale) and not torch.compiler.is_compiling():
        if bool((problem.score.scale == 0).any()):
            return "needs a scale other than 0 in every head, to find its gradient"
    elif not isinstance(problem.score, Dot | HeadScale):
        return f"has no kernel for the score {type(problem.score).__name__}"
    if sum(as_mixture(branch) is not None for branch in problem.branches) > MAX_BRANCHES:
        return f"mixes at most {MAX_BRANCHES} branches of windows"
    return None


def attend_native(problem: Problem) -> Attended:
    """Evaluate a problem with the native kernels."""
    call = Call.of(problem)
    if isinstance(problem.score, PairGate):
        return attend_pair_gate(problem, problem.score, call)
    windows: dict[int, MixtureBranch] = {}
    choices: dict[int, SelectedInputs] = {}
    parts: list[Tensor] = []
    logsumexp: list[Tensor | None] = [None] * len(problem.branches)
    for number, branch in enumerate(problem.branches):
        weight = None if problem.weights is None else problem.weights[..., number]
        window, top_k = as_mixture(branch), as_top_k(branch)
        if window is not None:
            windows[number] = window
        elif top_k is not None:
            choices[number] = choose(problem, top_k, call, weight)
        else:
            assert isinstance(branch, Segments)
            output, logsumexp[number] = attend_segments(
                problem.q, problem.k, problem.v,
                queries=branch.queries, length=branch.length, layout=problem.layout, scale=call.scale,
                summaries=branch.summaries,
            )  # fmt: skip
            parts.append(output if weight is None else output * weight[..., None].to(output.dtype))
    if windows:
        mixed = mix(problem, windows, call)
        if len(choices) == 1:
            (only,) = choices
            output, window_lse, logsumexp[only] = window_and_top_k(mixed, choices[only])
        else:
            output, window_lse, _, _ = mixture_forward(mixed)
        parts.append(output)
        for place, number in enumerate(windows):
            logsumexp[number] = window_lse[..., place].detach()
    for number, choice in choices.items():
        if logsumexp[number] is None:
            output, lse = selected_forward(choice)
            parts.append(output)
            logsumexp[number] = lse.detach()
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    selected: list[Tensor | None] = [None] * len(problem.branches)
    for number, choice in choices.items():
        groups = problem.q.shape[1] // max(choice.selected.shape[1], 1)
        selected[number] = choice.selected if groups == 1 else choice.selected.repeat_interleave(groups, dim=1)
    return Attended(total, torch.stack([one for one in logsumexp if one is not None], dim=-1), tuple(selected))


@dataclass(frozen=True, eq=False)
class Call:
    """What all kernels take besides queries, keys and values."""

    position: Tensor
    """int32 [B, T]."""
    start: Tensor
    """int32 [B, T]."""
    scale: Tensor | float
    """A number, or [H]."""

    @staticmethod
    def of(problem: Problem) -> Call:
        width = problem.q.shape[-1]
        scale: Tensor | float = width**-0.5
        if isinstance(problem.score, Dot):
            scale = problem.score.factor(width)
        elif isinstance(problem.score, HeadScale):
            scale = problem.score.scale.float() * scale
        layout = problem.layout
        return Call(layout.position.int(), layout.start.int(), scale)


@dataclass(frozen=True)
class TopKBranch:
    """A top-k, alone or with the query's own key beside it."""

    top_k: TopK
    include_self: bool


def as_mixture(branch: Branch) -> MixtureBranch | None:
    """The branch as the mixture kernel takes it; None if it has a member of another kind."""
    window, prefix, soft = 0, 0, None
    for member in members(branch):
        if isinstance(member, Causal):
            window = CAUSAL
        elif isinstance(member, Window):
            window = max(window, min(member.size, CAUSAL))
        elif isinstance(member, Prefix):
            prefix = max(prefix, min(member.size, CAUSAL))
        elif isinstance(member, SoftWindow) and soft is None:
            soft = member
        else:
            return None
    if soft is None:
        return MixtureBranch(window=window, prefix=prefix)
    return MixtureBranch(window=window, prefix=prefix, width=soft.width, edge=float(soft.edge), limit=soft.limit)


def as_top_k(branch: Branch) -> TopKBranch | None:
    """The branch as a top-k, alone or joined with Window(1); None if it is anything else."""
    found = [member for member in members(branch) if isinstance(member, TopK)]
    others = [member for member in members(branch) if not isinstance(member, TopK)]
    if len(found) != 1 or any(other != Window(1) for other in others):
        return None
    # The own block is always read whole, so the own key needs no mention there.
    return TopKBranch(found[0], include_self=bool(others) and found[0].select == "exact")


def mix(problem: Problem, windows: dict[int, MixtureBranch], call: Call) -> MixtureInputs:
    """The mixture of a problem's windows, by their numbers."""
    weights = problem.weights
    if weights is not None and len(windows) < len(problem.branches):
        weights = weights[..., list(windows)]
    return mixture_inputs(
        problem.q, problem.k, problem.v, branches=list(windows.values()), weights=weights,
        position=call.position, start=call.start, scale=call.scale,
    )  # fmt: skip


def choose(problem: Problem, branch: TopKBranch, call: Call, weight: Tensor | None) -> SelectedInputs:
    """Select the keys or blocks of a top-k branch, and what attention over them takes."""
    top_k = branch.top_k
    q, k = problem.q, problem.k
    if top_k.indexer is not None:
        q, k = (part.detach().float() for part in (top_k.indexer.queries, top_k.indexer.keys))
    elif isinstance(call.scale, Tensor) or call.scale < 0:
        # Keys are ranked by their scores: a negative scale turns the order of the dot products around.
        q = q.detach() * torch.as_tensor(call.scale).detach().sign().to(q.dtype).view(-1, 1, 1)
    place = problem.layout.query_place
    if top_k.select == "exact":
        budget = top_k.keys_per_query(place).int()
        chosen = select_exact(
            q, k, position=call.position, start=call.start, budget=budget, capacity=top_k.most_keys(k.shape[2])
        )
    else:
        budget = top_k.blocks_per_query(place).int()
        chosen = select_blocks(
            q, k, position=call.position, start=call.start, budget=budget, block=top_k.block, pooled=top_k.pooled,
            capacity=top_k.most_blocks(k.shape[2]),
        )  # fmt: skip
    return selected_inputs(
        problem.q, problem.k, problem.v, chosen,
        position=call.position, start=call.start, block=top_k.block if top_k.select == "blocks" else None,
        include_self=branch.include_self, weights=weight, scale=call.scale,
    )  # fmt: skip


def attend_pair_gate(problem: Problem, score: PairGate, call: Call) -> Attended:
    """One branch of windows and prefixes under pair-gated scores."""
    (branch,) = (as_mixture(branch) for branch in problem.branches)
    assert branch is not None
    result = pair_gate(
        problem.q, problem.k, problem.v, score.queries, score.keys,
        output=score.output, bias=score.bias, scale=score.scale, form=score.form, threshold=score.threshold,
        position=call.position, start=call.start, branches=[branch],
    )  # fmt: skip
    output = result.output
    if problem.weights is not None:
        output = output * problem.weights.to(output.dtype)
    return Attended(output, result.logsumexp, (None,))


def type_names(branch: Branch) -> str:
    """The branch's kinds, for messages: "Window | Strided"."""
    return " | ".join(type(member).__name__ for member in members(branch))
