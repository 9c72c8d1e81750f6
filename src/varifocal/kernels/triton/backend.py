"""The triton backend: branches of windows, prefixes and soft windows, alone or mixed, in kernels written for GPUs.

They have been run in Triton's interpreter and compiled for GPUs, but never launched on one. "auto" does not take this
backend; it is chosen by name, and says so once.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from varifocal.equations.branches import SoftWindow, members
from varifocal.equations.normalizers import SinkLogit
from varifocal.equations.problem import Attended, Problem
from varifocal.equations.scores import Dot, HeadScale
from varifocal.kernels.native.once import transformed
from varifocal.kernels.triton.arrangement import MOST_BRANCHES, Sizes, as_sizes

HONOURS = frozenset({
    *("q", "k", "v", "branches", "weights", "score", "layout", "normalizer", "shortcuts", "wants_logsumexp"),
})  # fmt: skip
"""The parts of problems that are known here; shortcuts are for other branches, and for a cache on a CPU."""

TYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256


class NeverLaunchedWarning(UserWarning):
    """Kernels run that nobody has run on a GPU before, as far as is known."""


TOLD: set[str] = set()
"""Warnings that were given already."""


def prepare(problem: Any) -> Callable[[], Attended] | str:
    """What runs the problem, or why these kernels cannot, as the end of a sentence."""
    if not isinstance(problem, Problem):
        return f"does not know the problem {type(problem).__name__}"
    if (reason := why_not_equation(problem)) is not None:
        return reason
    found = []
    for branch in problem.branches:
        one = as_sizes(branch, problem.q.shape[1])
        if one is None:
            return f"has no kernel for the branch {' | '.join(type(member).__name__ for member in members(branch))}"
        found.append(one)
    return why_not_here(problem) or partial(attend_triton, problem, found)


def why_not_here(problem: Problem) -> str | None:
    """Why the tensors of a problem cannot be taken; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "is missing here: it needs the package triton, which comes with torch for CUDA"
    if problem.q.device.type == "cpu":
        if not is_interpreted():
            return "runs on cuda tensors, and on a CPU only in Triton's interpreter (TRITON_INTERPRET=1), for checking"
    elif problem.q.device.type != "cuda":
        return f"runs on cuda tensors, got {problem.q.device}"
    if problem.q.dtype not in TYPES:
        return f"runs float32, bfloat16 and float16, got {problem.q.dtype}"
    if not torch.compiler.is_compiling() and transformed():
        return "takes no part in forward-mode derivatives and the transforms of torch.func"
    if problem.q.shape[1] == 0:
        return "needs at least one query head, got none"
    if not 1 <= problem.q.shape[3] <= WIDEST:
        return f"runs heads of 1 to {WIDEST} channels, got {problem.q.shape[3]}"
    return None


def why_not_equation(problem: Problem) -> str | None:
    """Why score, normalizer or number of branches cannot be taken; None if they can."""
    if not isinstance(problem.score, Dot | HeadScale):
        return f"has no kernel for the score {type(problem.score).__name__}"
    if problem.normalizer is not None and not isinstance(problem.normalizer, SinkLogit):
        return f"has no kernel for the normalizer {type(problem.normalizer).__name__}"
    if len(problem.branches) > MOST_BRANCHES:
        return f"mixes at most {MOST_BRANCHES} branches, got {len(problem.branches)}"
    return None


def is_interpreted() -> bool:
    """Whether the kernels of this process run in Triton's interpreter."""
    from varifocal.kernels.triton.mixture import interpreted

    return interpreted()


# torch.compile cannot look into triton: it takes the answer as it is.
is_interpreted._dynamo_marked_constant = True  # type: ignore[attr-defined]


def attend_triton(problem: Problem, branches: list[tuple[Sizes, SoftWindow | None]]) -> Attended:
    """Evaluate a problem whose branches were taken apart."""
    from varifocal.kernels.triton.mixture import triton_mixture

    warn_once(problem.q.device.type)
    device, dtype = problem.q.device.type, problem.q.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        if dtype not in TYPES:
            raise ValueError(f"backend 'triton' runs float32, bfloat16 and float16, got autocast to {dtype}")
    q, k, v = (part.to(dtype) for part in (problem.q, problem.k, problem.v))
    layout = problem.layout
    plain = layout.one_document and layout.at_end
    position, start = (None, None) if plain else layout.ranges
    weights = None if problem.weights is None else problem.weights.float().contiguous()
    width = widths(problem.q, branches)
    sink = problem.normalizer.logit.float() if isinstance(problem.normalizer, SinkLogit) else None
    scale = problem.score.scale.float() if isinstance(problem.score, HeadScale) else None
    factor = problem.score.factor(q.shape[3]) if isinstance(problem.score, Dot) else q.shape[3] ** -0.5
    learning = (q, k, v, weights, sink, scale, width)
    with torch.autocast(device, enabled=False):
        output, logsumexp, _ = triton_mixture(
            q, k, v, weights, sink, scale, width,
            None if layout.at_end else position, start, None if plain else layout.seen,
            factor,
            [size for sizes, _ in branches for size in sizes.window],
            [size for sizes, _ in branches for size in sizes.prefix],
            [sizes.limit for sizes, _ in branches],
            [sizes.edge if sizes.soft else 0.0 for sizes, _ in branches],
            torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in learning),
        )  # fmt: skip
    return Attended(output.to(problem.q.dtype), logsumexp.detach(), (None,) * len(branches))


def widths(q: Tensor, branches: list[tuple[Sizes, SoftWindow | None]]) -> Tensor | None:
    """float32 [M, B, H, T], 0 for branches without a soft window that counts; None if there is no other."""
    found = [window.width.float() if window is not None and sizes.soft else None for sizes, window in branches]
    if all(one is None for one in found):
        return None
    nothing = q.new_zeros(q.shape[:3], dtype=torch.float32)
    return torch.stack([nothing if one is None else one for one in found])


def warn_once(device: str) -> None:
    """Say that nobody has launched these kernels on a GPU before."""
    if device != "cuda" or torch.compiler.is_compiling() or device in TOLD:
        return
    TOLD.add(device)
    warnings.warn(
        "the kernels of backend 'triton' were run in Triton's interpreter and compiled for GPUs, but never launched on "
        "one; `varifocal check --device cuda --backend triton` checks them here",
        NeverLaunchedWarning,
        stacklevel=2,
    )
