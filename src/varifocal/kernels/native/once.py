"""What kernels can be asked for: one backward, and no transforms.

Whoever asks for more is told so, instead of getting a derivative with a part missing.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

Gradient = tuple[Tensor | None, ...]


def differentiable_once(
    what: str, *, instead: str = "use backend='reference'"
) -> Callable[[Callable[..., Gradient]], Callable[..., Gradient]]:
    """A decorator of the backward(ctx, *gradients) of `what`, which must have saved every tensor that it depends on.

    `instead` tells the user what to do for second derivatives.

    Torch's own decorator looks at the incoming gradients alone. Where these are constants it cuts the graph without a
    word, and the second derivative comes out as if the first did not depend on anything.
    """

    def decorate(backward: Callable[..., Gradient]) -> Callable[..., Gradient]:
        @functools.wraps(backward)
        def run(ctx: Any, *grads: Tensor | None) -> Gradient:
            sources: list[Tensor] = []
            # Gradients are recorded only if they are to be differentiated again; compiled code never does.
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                sources = [x for x in (*ctx.saved_tensors, *grads) if x is not None and x.requires_grad]
            with torch.no_grad():
                found = backward(ctx, *grads)
            if not sources:
                return found
            there = [one for one in found if one is not None]
            refusal = f"{what} cannot be differentiated twice; {instead}"
            guarded = iter(_Guarded.apply(refusal, len(there), *there, *sources))  # type: ignore[no-untyped-call]
            return tuple(None if one is None else next(guarded) for one in found)

        return run

    return decorate


class _Guarded(torch.autograd.Function):
    """Hands gradients on, and says no when they are differentiated."""

    @staticmethod
    def forward(refusal: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(one.view_as(one) for one in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.refusal = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradient:
        raise RuntimeError(ctx.refusal)


def has_tangent(x: Tensor) -> bool:
    """Whether a derivative along a tangent of x is wanted."""
    return forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


def in_forward_mode() -> bool:
    """Whether derivatives along tangents are being taken."""
    return forward_ad._current_level >= 0


def transformed() -> bool:
    """Whether one of torch.func's transforms (vmap, grad, ...) is at work, or forward mode: no kernel knows them."""
    return in_forward_mode() or torch._C._functorch.peek_interpreter_stack() is not None
