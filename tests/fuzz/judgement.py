"""Whether a backend answers a trial as accurately as the reference does at the same type."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tests.fuzz.trials import WIDTH_STEPS, Trial
from tests.kernels.accuracy import ROUNDINGS, SLACK
from varifocal import Attended, HeadScale, PairGate
from varifocal.attention.attend import lay_out
from varifocal.equations.problem import Problem
from varifocal.kernels.flex.backend import attend_flex
from varifocal.kernels.flex.backend import why_not as why_not_flex
from varifocal.kernels.flex.dense import attend_dense

Results = dict[str, Tensor]
Run = Callable[[Trial], Attended]

PERTURBATIONS = 3
REFUSALS = ("cannot be differentiated twice", "has no forward-mode derivative")
"""What a kernel may say in place of an answer."""


def reference(trial: Trial) -> Attended:
    """The law."""
    return trial.attend("reference")


def auto(trial: Trial) -> Attended:
    """What a user gets: the native kernels wherever they can."""
    return trial.attend("auto")


def problem_of(trial: Trial) -> Problem:
    """The call as a backend receives it."""
    layout = lay_out(trial.q, trial.k, trial.v, documents=trial.documents, positions=trial.positions)
    return Problem(trial.q, trial.k, trial.v, trial.branches, trial.weights, trial.score, layout)


def flex(trial: Trial) -> Attended:
    """The readings of the flex backend, evaluated pair by pair in plain torch."""
    return attend_flex(problem_of(trial), execute=attend_dense)


def flex_serves(trial: Trial) -> bool:
    """Whether the flex backend takes the trial; its kernel has no backward on a CPU, its readings have."""
    with torch.no_grad():
        return why_not_flex(problem_of(trial)) is None


def results(trial: Trial, run: Run) -> Results:
    """All that a trial asks for, by name."""
    if trial.ask == "forward_mode":
        return {"tangent": tangent(trial, run)}
    if trial.ask == "autocast" and trial.dtype != torch.float64:
        with torch.autocast("cpu", torch.bfloat16):
            attended = run(trial)
    else:
        attended = run(trial)
    found: Results = {"output": attended.output}
    if trial.wants_logsumexp:
        found["logsumexp"] = attended.logsumexp
    found |= {f"selected{m}": chosen for m, chosen in enumerate(attended.selected) if chosen is not None}
    if attended.output.requires_grad:
        twice = trial.ask == "gradients_twice"
        first = gradients(attended.output, trial.upstream.to(attended.output.dtype), trial, create_graph=twice)
        found |= first
        if twice:
            found |= second_gradients(attended.output, first, trial)
    return {name: one.detach() for name, one in found.items()}


def gradients(output: Tensor, upstream: Tensor, trial: Trial, *, create_graph: bool = False) -> Results:
    """Gradients to every tensor that learns, by name."""
    leaves = trial.leaves()
    found = torch.autograd.grad(output, leaves, upstream, allow_unused=True, create_graph=create_graph)
    pairs = zip(trial.learning, leaves, found, strict=True)
    return {f"d{name}": torch.zeros_like(leaf) if one is None else one for name, leaf, one in pairs}


def second_gradients(output: Tensor, first: Results, trial: Trial) -> Results:
    """Gradients of the squared gradients; and of the output, so that there is always something to differentiate."""
    total = output.double().sum() + sum(one.double().square().sum() for one in first.values())
    return {f"d{name}": one for name, one in gradients(total, torch.ones_like(total), trial).items()}


def tangent(trial: Trial, run: Run) -> Tensor:
    """How the output changes along a direction of q and v."""
    generator = torch.Generator().manual_seed(trial.seed)
    with forward_ad.dual_level():
        moved = dict(trial.bases)
        for name in ("q", "v"):
            direction = torch.randn(moved[name].shape, dtype=torch.float64, generator=generator)
            moved[name] = moving(moved[name], direction.to(moved[name].dtype))
        output = run(trial.on(moved)).output
        return tangent_of(output).clone()


def moving(x: Tensor, direction: Tensor) -> Tensor:
    """x on its way along a direction."""
    dual: Tensor = forward_ad.make_dual(x, direction)  # type: ignore[no-untyped-call]
    return dual


def tangent_of(x: Tensor) -> Tensor:
    """How x changes along the directions of what it was made of; 0 if it does not."""
    found: Tensor | None = forward_ad.unpack_dual(x).tangent  # type: ignore[no-untyped-call]
    return torch.zeros_like(x) if found is None else found


def complaints(trial: Trial, run: Run = auto) -> list[str]:
    """What is wrong with the answers of a backend; nothing if they are right, or refused as they may be."""
    exact = results(trial.exact(), reference)
    try:
        found = results(trial, run)
    except Exception as error:  # any: a trial is a call that the reference answers
        if isinstance(error, RuntimeError) and any(words in str(error) for words in REFUSALS):
            return []
        return [f"{type(error).__name__}: {' '.join(str(error).split())}"]
    wrong = wrong_kinds(trial, found, exact)
    if wrong:
        return wrong
    own = results(trial.rebuilt(trial.bases), reference)
    errors = {name: error_of(found[name], exact[name], size(name, trial, exact)) for name in exact}
    allowed = {name: allowance(name, trial, own, exact) for name in exact}
    suspects = [name for name, error in errors.items() if not error <= allowed[name]]
    if not suspects:
        return []
    for number in range(PERTURBATIONS):
        moved = results(trial.perturbed(8 * torch.finfo(torch.float32).eps, number), reference)
        for name in suspects:
            allowed[name] = max(allowed[name], SLACK * error_of(moved[name], exact[name], size(name, trial, exact)))
    if any(allowed[name] > 0.1 for name in suspects if name.startswith("selected")):
        return []  # the ranking hangs on a rounding: there are several right answers
    return [
        f"{name} is off by {errors[name]:.1e}, allowed {allowed[name]:.1e}"
        for name in suspects
        if not errors[name] <= allowed[name]
    ]


def wrong_kinds(trial: Trial, found: Results, exact: Results) -> list[str]:
    """Results that are missing, or of another shape or type than they should be."""
    if found.keys() != exact.keys():
        return [f"got {sorted(found)}, expected {sorted(exact)}"]
    wrong = [
        f"{name} has shape {[*found[name].shape]}, expected {[*exact[name].shape]}"
        for name in exact
        if found[name].shape != exact[name].shape and not name.startswith("selected")
    ]
    if "output" in found and found["output"].dtype != trial.dtype:
        wrong.append(f"output is {found['output'].dtype}, expected {trial.dtype}")
    return wrong


def allowance(name: str, trial: Trial, own: Results, exact: Results) -> float:
    """The error that is allowed: twice the reference's, or some roundings of the type."""
    if name.startswith("selected"):
        return 0.0
    narrow = name != "logsumexp" and trial.dtype == torch.bfloat16
    floor = ROUNDINGS * torch.finfo(torch.bfloat16 if narrow else torch.float32).eps
    return max(floor, SLACK * error_of(own[name], exact[name], size(name, trial, exact)))


def size(name: str, trial: Trial, exact: Results) -> float:
    """What an error is relative to: the largest entry, or the terms that cancel in it, or 1."""
    finite = exact[name].double()[torch.isfinite(exact[name])]
    return max(1.0, largest(finite), cancelling(name, trial))


def cancelling(name: str, trial: Trial) -> float:
    """What dS = p (dO.v - dO.O) is rounded relative to: dO.v, about sqrt(D), times what dS is multiplied by.

    That is k for q, q for k, q.k for scales and pair networks, 1 / (width - x) for widths. The reference adds up both
    sums in one order, so that they often cancel exactly; a kernel does not.
    """
    if name in ("output", "logsumexp", "dv"):
        return 1.0
    width = trial.q.shape[-1]
    sums = math.sqrt(width) * max(1.0, largest(trial.weights))
    if name != "tangent" and not name.startswith(("dq", "dk", "dscale", "dpair")):
        return sums * WIDTH_STEPS
    factor = abs(float(getattr(trial.score, "scale", None) or width**-0.5)) if is_plain(trial) else 2 * width**-0.5
    q, k = largest(trial.q), largest(trial.k)
    return factor * sums * (k if name in ("dq", "tangent") else q if name == "dk" else q * k)


def largest(x: Tensor | None) -> float:
    """The size of the largest entry that is a number."""
    return 0.0 if x is None or not x.numel() else float(torch.nan_to_num(x.detach().double()).abs().max())


def is_plain(trial: Trial) -> bool:
    """Whether the score's scale is one number."""
    return not isinstance(trial.score, HeadScale | PairGate)


def error_of(found: Tensor, exact: Tensor, relative_to: float) -> float:
    """The largest difference; infinite for NaN, and where only one is infinite. Of selections, 1 for any difference."""
    if found.shape != exact.shape:  # selections, of which one may list more that is not there
        width = min(found.shape[-1], exact.shape[-1])
        rest = torch.cat((found[..., width:].flatten(), exact[..., width:].flatten()))
        if bool((rest >= 0).any()):
            return math.inf
        found, exact = found[..., :width], exact[..., :width]
    if not exact.numel():
        return 0.0
    if not exact.is_floating_point():
        return float(not torch.equal(found, exact))
    found, exact = found.double(), exact.double()
    same = (found == exact) | (torch.isnan(exact) & torch.isnan(found))
    difference = torch.where(same, 0.0, (found - exact).abs() / relative_to)
    return float(torch.nan_to_num(difference, nan=math.inf).max())
