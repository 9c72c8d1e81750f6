"""Cheap steps that are computed again in the backward pass instead of keeping their results for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def recomputed(step: Callable[..., Any], *inputs: Any) -> Any:
    """step(*inputs), keeping only the inputs for the backward pass, which runs the step once more.

    For norms, rotations and activations: they cost little, and what they keep is most of a layer's memory. A matrix
    product at the end of the step is not repeated, since torch stops as soon as its input is there.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return step(*inputs)
    # No step here draws random numbers, so their state need not be saved and restored.
    return checkpoint(step, *inputs, use_reentrant=False, preserve_rng_state=False)
