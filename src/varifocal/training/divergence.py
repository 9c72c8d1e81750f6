"""Where a training step went wrong: the first layer whose output, or the last whose gradient, is not finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from varifocal.model.modeling import VarifocalForCausalLM


class DivergedError(ValueError):
    """A loss or a gradient is no longer a finite number."""


def where_it_diverges(model: VarifocalForCausalLM, batches: Sequence[Mapping[str, Tensor]]) -> str:
    """The place in the model, in words, found by running the batches of the step once more on unchanged weights."""
    parts = named_parts(model)
    for name, part in parts:
        if not all(bool(one.isfinite().all()) for one in part.parameters()):
            return f"in the weights of {name}"
    for batch in batches:
        seen: list[str] = []
        hooks = [part.register_forward_hook(noting(name, seen)) for name, part in parts]
        try:
            model.zero_grad(set_to_none=True)
            loss = model(**batch).loss
        finally:
            for hook in hooks:
                hook.remove()
        if seen:
            return f"in the output of {seen[0]}"
        if not bool(loss.isfinite()):
            return "in the loss itself"
        loss.backward()
        # Gradients flow from the last part to the first: the first bad one on that way is the origin.
        for name, part in reversed(parts):
            gradients = (one.grad for one in part.parameters() if one.grad is not None)
            if not all(bool(gradient.isfinite().all()) for gradient in gradients):
                return f"in the gradient of {name}"
    return "in the sum of the gradients" if len(batches) > 1 else "in another process"


def named_parts(model: VarifocalForCausalLM) -> list[tuple[str, nn.Module]]:
    """The parts that a text passes, in order."""
    layers = [(f"layer {number}", layer) for number, layer in enumerate(model.model.layers)]
    return [("the embedding", model.model.embed_tokens), *layers, ("the last norm", model.model.norm)]


def noting(name: str, seen: list[str]) -> Callable[[nn.Module, Any, Any], None]:
    """A hook that notes the part's name if its output is not finite."""

    def hook(_: nn.Module, __: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if not bool(torch.isfinite(hidden).all()):
            seen.append(name)

    return hook
