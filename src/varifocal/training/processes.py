"""The processes that work on one run together, and what the first of them decides for all."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as distributed
from torch import Tensor

Result = TypeVar("Result")


def started_together() -> bool:
    """Whether torchrun, or a launcher like it, started several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_first_process() -> bool:
    """Whether this process speaks for all; known before they have met."""
    return int(os.environ.get("RANK", "0")) == 0


def restarted_by_torchrun() -> bool:
    """Whether torchrun started this process again after one of its processes had died (--max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def together() -> bool:
    """Whether there are several processes."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def decided_by_first(decide: Callable[[], Result]) -> Result:
    """What `decide` returns, or the ValueError that it raises, in the first process: the others receive the same."""
    if not together():
        return decide()
    answer: list[Any] = [None, None]
    if distributed.get_rank() == 0:
        try:
            answer[0] = decide()
        # The others wait in the broadcast below: an error must travel there too, or they would wait for ever.
        except (ValueError, OSError) as error:
            answer[1] = str(error)
    distributed.broadcast_object_list(answer)
    if answer[1] is not None:
        raise ValueError(answer[1])
    result: Result = answer[0]
    return result


def summed_over_processes(values: Tensor) -> Tensor:
    """The sum of a small tensor over all processes."""
    if together():
        distributed.all_reduce(values)
    return values
