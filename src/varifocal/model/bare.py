"""Whether a kernel may take a module's weights in place of calling it."""

from __future__ import annotations

from torch import Tensor, nn


def is_bare(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling a module does what its kind does with its weights, and nothing else.

    Adapters take a module's place or derive from it; hooks are attached to it, or exchange its forward; quantized
    weights are tensors of another type. Whoever reads the weights of such a module computes something else than it.
    """
    return (
        type(module) is kind
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        and "forward" not in module.__dict__
        and all(type(one) in (nn.Parameter, Tensor, type(None)) for one in module._parameters.values())
    )
