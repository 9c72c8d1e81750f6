"""Logits that are computed when somebody reads them: a loss needs none, and those of a long text are large."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


class LateLogits:
    """The logits [B, T, V] of hidden states, not computed yet.

    Held by an output in place of its logits, and never seen by those who read them: the output gives the tensor.
    """

    def __init__(self, head: nn.Module, hidden: Tensor, *, training: bool) -> None:
        self.head, self.hidden = head, hidden
        self.training = training
        """Whether the model trains. Then a walk over all values of an output passes this by: frameworks walk over the
        outputs of every step, to find the tensors that have gradients or to convert them."""
        kind = hidden.device.type
        self.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self.version = version_of(head)
        self.found: Tensor | None = None

    def read(self) -> Tensor:
        """The logits, computed as the forward pass would have."""
        if self.found is not None:
            return self.found
        if version_of(self.head) != self.version:
            raise ValueError(
                "these logits were not read before the head's weights changed; read them before the optimizer's step, "
                "or ask for them with logits_to_keep=0"
            )
        with torch.autocast(self.hidden.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            logits: Tensor = self.head(self.hidden)
        # accelerate gives outputs of a pass under autocast in float32.
        logits = logits if self.autocast is None else logits.float()
        if torch.is_grad_enabled() or not self.hidden.requires_grad:
            # Without gradients where there could be some, they serve this reader alone.
            self.found = logits
        return logits

    def walked_over(self) -> Tensor:
        """What a walk over all values of an evaluation meets: a tensor, which may be left unread."""
        # Gradients are not followed through a tensor that was not read.
        if self.found is not None or torch.is_grad_enabled():
            return self.read()
        return UnreadLogits(self)

    def __repr__(self) -> str:
        return "LateLogits(not computed; output.logits computes them)"


class UnreadLogits(Tensor):
    """Logits of an evaluation as a tensor that knows its sizes, and is computed by whatever else is done with it."""

    late: LateLogits

    @staticmethod
    def __new__(cls, late: LateLogits) -> UnreadLogits:
        hidden = late.hidden
        shape = (*hidden.shape[:-1], late.head.weight.shape[0])  # type: ignore[index]
        dtype = hidden.dtype if late.autocast is None else torch.float32
        made: UnreadLogits = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)
        made.late = late
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in SIZES_AND_KINDS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(read, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map(read, (args, kwargs or {}))
        return func(*args, **kwargs)


KINDS = ("shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_leaf")
SIZES_AND_KINDS = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__,
    *(getattr(Tensor, name).__get__ for name in KINDS),
}  # fmt: skip
"""What can be told of logits that were not computed."""


def read(value: Any) -> Any:
    """The logits, if the value stands for some; any other value as it is."""
    if isinstance(value, UnreadLogits):
        return value.late.read()
    return value.read() if isinstance(value, LateLogits) else value


def version_of(head: nn.Module) -> int | None:
    """A number that changes with the head's weight; None if it has none that could tell."""
    weight = getattr(head, "weight", None)
    return weight._version if isinstance(weight, Tensor) and not weight.is_inference() else None
