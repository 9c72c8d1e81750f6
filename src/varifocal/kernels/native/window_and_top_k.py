"""Windows and a top-k together: one set of gradients for both, added up in place.

    o = mixture of windows + attention over what was chosen

As two operators each would hold gradients of q, k and v of its own, and autograd would add them up.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import needs_backward
from .mixture import MixtureInputs, mixture_backward, mixture_forward, scale_gradient
from .pull import pull_along, release
from .selected import SelectedInputs, selected_backward, selected_forward


class WindowAndTopK(NamedTuple):
    """What `window_and_top_k` returns."""

    output: Tensor
    """[B, H, T, D] in q's dtype."""
    window_lse: Tensor
    """[B, H, T, M] float32, without gradient."""
    chosen_lse: Tensor
    """[B, H, T] float32, without gradient."""


@torch.library.custom_op("varifocal::window_and_top_k", mutates_args=(), device_types="cpu")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: Tensor,
    position: Tensor,
    start: Tensor,
    weights: Tensor,
    width: Tensor | None,
    chosen: Tensor,
    chosen_weights: Tensor,
    window: Sequence[int],
    prefix: Sequence[int],
    limit: Sequence[int],
    edge: Sequence[float],
    skip_closed: bool,
    block: int,
    include_self: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output and both lse; for the backward norm, the branches' outputs and (for blocks) the top-k's, or [0]."""
    tensors = (q, k, v, scale, position, start, weights, width, chosen, chosen_weights)
    windows, choice = _inputs(tensors, (window, prefix, limit, edge, skip_closed, block, include_self))
    out, window_lse, norm, branch_out = mixture_forward(*windows, save)
    chosen_out, chosen_lse = selected_forward(*choice)
    out += chosen_out
    # Over single keys the backward finds the pull along the top-k's output by itself.
    kept = chosen_out if save and block else chosen_out.new_empty(0)
    return out, window_lse, chosen_lse, norm, branch_out, kept


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, block, save = arguments[0], arguments[15], arguments[17]
    windows, choice = _inputs(arguments[:10], arguments[10:17])
    out, window_lse, norm, branch_out = mixture_forward(*windows, save)
    chosen_out, chosen_lse = selected_forward(*choice)
    return out, window_lse, chosen_lse, norm, branch_out, chosen_out if save and block else q.new_empty(0)


def _inputs(tensors: Sequence[Any], plain: Sequence[Any]) -> tuple[MixtureInputs, SelectedInputs]:
    """The inputs of both parts from those of the operator, in its order."""
    *shared, weights, width, chosen, chosen_weights = tensors
    *windows, block, include_self = plain
    mixed: tuple[Any, ...] = (*shared, weights, width, *windows)
    selected: tuple[Any, ...] = (*shared, chosen, chosen_weights, block, include_self)
    return MixtureInputs(*mixed), SelectedInputs(*selected)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *ctx.plain, ctx.save = inputs[10:]
    ctx.save_for_backward(*inputs[:10], *output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, *_):  # type: ignore[no-untyped-def]
    if not ctx.save:
        raise RuntimeError("varifocal::window_and_top_k was called with save=False and cannot be differentiated")
    if grad_out is None:
        return (None,) * 18
    *tensors, out, window_lse, chosen_lse, norm, branch_out, chosen_out = ctx.saved_tensors
    windows, choice = _inputs(tensors, ctx.plain)
    assert choice.weights is not None
    q, position, start = windows.q, windows.position, windows.start
    pulls = [pull_along(grad_out, one, position, start) for one in branch_out]
    whole = pull_along(grad_out, out, position, start)
    pull = pull_along(grad_out, chosen_out, position, start) if choice.block else None
    # The outputs have served: without them the gradients find room where they stood.
    del out, branch_out, chosen_out
    release(ctx)
    dq, dk, dv, dweight = selected_backward(grad_out, pull, None, chosen_lse, *choice)
    pulls.append(whole - (choice.weights * dweight if pull is None else pull))
    dweights, dwidth = mixture_backward(
        dq, dk, dv, True, grad_out, torch.stack(pulls, dim=-1), None, window_lse, norm, *windows
    )
    dscale = scale_gradient(dq, q, windows.scale, position, start) if ctx.needs_input_grad[3] else None
    return (
        *(dq.to(q.dtype), dk, dv, dscale, None, None, dweights),
        *(None if windows.width is None else dwidth, None, dweight),
        *(None,) * 8,
    )


_forward.register_autograd(_backward, setup_context=_setup_context)
_forward.register_autocast("cpu", torch.float32)


def window_and_top_k(windows: MixtureInputs, choice: SelectedInputs) -> WindowAndTopK:
    """The sum of a mixture and of attention over selected keys; both share q, k, v, scale, position and start.

    Both have weights. Differentiable in q, k, v, scale, weights and widths, not in the log-sum-exps.
    """
    tensors = (*windows[:8], choice.chosen, choice.weights)
    plain = (*windows[8:], choice.block, choice.include_self)
    output, window_lse, chosen_lse, *_ = _forward(*tensors, *plain, needs_backward(*tensors))
    return WindowAndTopK(output, window_lse, chosen_lse)
