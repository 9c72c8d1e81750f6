"""Gates held at a given value for a while: what would a model say if it read only near, or only far?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from varifocal.attention.gates import Gate, Gated


@contextmanager
def force_gates(module: nn.Module, value: float) -> Iterator[None]:
    """Inside the block every gate in `module` answers `value`: 1 reads the first branch alone, 0 the second alone.

    Parameters, buffers and modules are as before when the block is left, also by an error. Modules without gates
    are not changed. Other threads that run the same module meanwhile see the forced gates too.
    """
    if not 0 <= value <= 1:
        raise ValueError(f"a forced gate must lie between 0 and 1, got {value}")

    def answer(gate: nn.Module, given: Any, gated: Gated) -> Gated:
        return Gated(torch.full_like(gated.value, value), {})

    with ExitStack() as stack:
        for gate in gates_of(module):
            stack.callback(gate.register_forward_hook(answer).remove)
        yield


def gates_of(module: nn.Module) -> list[Gate]:
    """The gates inside a module."""
    return [gate for gate in module.modules() if isinstance(gate, Gate)]
