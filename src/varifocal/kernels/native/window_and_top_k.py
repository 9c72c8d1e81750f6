"""Windows and a top-k together: one set of gradients for both, added up where they lie.

    o = mixture of windows + attention over what was selected

As two operators each would hold gradients of q, k and v of its own, and autograd would add them up.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import needs_backward
from .delta import delta_of
from .mixture import (
    DOT,
    MixtureBackwardInputs,
    MixtureInputs,
    mixture_backward,
    mixture_forward,
    scale_gradient,
)
from .operator import Context, Gradients, Operator, runs_plainly
from .selected import SelectedBackwardInputs, SelectedInputs, selected_backward, selected_forward


class WindowAndTopK(NamedTuple):
    """What `window_and_top_k` returns."""

    output: Tensor
    """[B, H, T, D] in q's dtype."""
    window_logsumexp: Tensor
    """[B, H, T, M] float32, without gradient."""
    selected_logsumexp: Tensor
    """[B, H, T] float32, without gradient."""


class WindowAndTopKInputs(NamedTuple):
    """The inputs of both parts, which share q, k, v, scale, position and start."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: Tensor
    position: Tensor
    start: Tensor
    weights: Tensor
    width: Tensor | None
    selected: Tensor
    selected_weights: Tensor
    window: Tensor
    prefix: Tensor
    limit: Sequence[int]
    edge: Sequence[float]
    skip_closed: bool
    block: int
    include_self: bool
    save: bool

    def windows(self) -> MixtureInputs:
        """Those of the mixture."""
        return MixtureInputs(
            q=self.q, k=self.k, v=self.v, scale=self.scale, position=self.position, start=self.start,
            weights=self.weights, width=self.width, window=self.window, prefix=self.prefix,
            limit=self.limit, edge=self.edge, skip_closed=self.skip_closed, save=self.save,
        )  # fmt: skip

    def selection(self) -> SelectedInputs:
        """Those of attention over selected keys."""
        return SelectedInputs(
            q=self.q, k=self.k, v=self.v, scale=self.scale, position=self.position, start=self.start,
            selected=self.selected, weights=self.selected_weights, block=self.block, include_self=self.include_self,
            save=self.save,
        )  # fmt: skip


class WindowAndTopKOutputs(NamedTuple):
    """The outputs of the forward; the last four, for the backward, are [0] unless `save`."""

    out: Tensor
    window_logsumexp: Tensor
    selected_logsumexp: Tensor
    norm: Tensor
    branch_out: Tensor
    selected_norm: Tensor
    selected_out: Tensor
    """[0] over single keys too: there the backward finds the delta of the top-k's output by itself."""


def _forward(given: WindowAndTopKInputs) -> WindowAndTopKOutputs:
    windows, selection = mixture_forward(given.windows()), selected_forward(given.selection())
    kept = selection.output if given.save and given.block else selection.output.new_empty(0)
    return WindowAndTopKOutputs(
        out=windows.out.add_(selection.output),
        window_logsumexp=windows.logsumexp,
        selected_logsumexp=selection.logsumexp,
        norm=windows.norm,
        branch_out=windows.branch_out,
        selected_norm=selection.norm,
        selected_out=kept,
    )


_operator = Operator("window_and_top_k", WindowAndTopKInputs, WindowAndTopKOutputs, _forward, fake=_forward)


def _backward(ctx: Context[WindowAndTopKInputs, WindowAndTopKOutputs], grads: WindowAndTopKOutputs) -> Gradients:
    inputs, outputs = ctx.saved()
    if not inputs.save:
        raise RuntimeError("varifocal::window_and_top_k was called with save=False and cannot be differentiated")
    grad_out, q, position, start = grads.out, inputs.q, inputs.position, inputs.start
    deltas = [delta_of(grad_out, one, position, start) for one in outputs.branch_out]
    whole = delta_of(grad_out, outputs.out, position, start)
    delta = delta_of(grad_out, outputs.selected_out, position, start) if inputs.block else None
    window_logsumexp, selected_norm, norm = outputs.window_logsumexp, outputs.selected_norm, outputs.norm
    # The outputs have served: without them the gradients find room where they stood.
    del outputs
    ctx.release()
    selection = selected_backward(SelectedBackwardInputs(grad_out, delta, None, selected_norm, inputs.selection()))
    deltas.append(whole - (inputs.selected_weights * selection.weights if delta is None else delta))
    windows = mixture_backward(
        MixtureBackwardInputs(
            grad_q=selection.q,
            grad_k=selection.k,
            grad_v=selection.v,
            accumulate=True,
            grad_out=grad_out,
            delta=torch.stack(deltas, dim=-1),
            grad_logsumexp=None,
            logsumexp=window_logsumexp,
            norm=norm,
            forward=inputs.windows(),
        )
    )
    dscale = scale_gradient(selection.q, q, inputs.scale, position, start) if ctx.wants("scale") else None
    return {
        "q": selection.q.to(q.dtype),
        "k": selection.k,
        "v": selection.v,
        "scale": dscale,
        "weights": windows.weights,
        "width": None if inputs.width is None else windows.width,
        "selected_weights": selection.weights,
    }


_operator.differentiate(
    _backward,
    without=("window_logsumexp", "selected_logsumexp", "norm", "branch_out", "selected_norm", "selected_out"),
)
_operator.autocast_to_float32()


def window_and_top_k(windows: MixtureInputs, selection: SelectedInputs) -> WindowAndTopK:
    """The sum of a mixture and of attention over selected keys; both share q, k, v, scale, position and start.

    Both have weights, and plain scores. Differentiable in q, k, v, scale, weights and widths, not in the logsumexps.
    """
    assert windows.score == DOT, "a top-k rates keys by their dot products alone"
    assert windows.weights is not None
    assert selection.weights is not None
    if runs_plainly(windows) and runs_plainly(selection):
        near, far = mixture_forward(windows), selected_forward(selection)
        return WindowAndTopK(near.out.add_(far.output), near.logsumexp, far.logsumexp)
    inputs = WindowAndTopKInputs(
        q=windows.q, k=windows.k, v=windows.v, scale=windows.scale, position=windows.position, start=windows.start,
        weights=windows.weights, width=windows.width, selected=selection.selected, selected_weights=selection.weights,
        window=windows.window, prefix=windows.prefix, limit=windows.limit, edge=windows.edge,
        skip_closed=windows.skip_closed, block=selection.block, include_self=selection.include_self, save=False,
    )  # fmt: skip
    made = _operator(inputs._replace(save=needs_backward(*(x for x in inputs if isinstance(x, Tensor)))))
    return WindowAndTopK(made.out, made.window_logsumexp, made.selected_logsumexp)
