"""How many threads torch computes with."""

from __future__ import annotations

import os
import reprlib

import torch

LEAST_MOST, A_PROCESSOR = 64, 16
"""A config that was written for a larger machine runs here too; thousands of threads end a process without a word."""


def use_threads(count: int | None) -> None:
    """Compute with so many threads, None for torch's choice; ValueError for more than the machine could serve."""
    if count is None:
        return
    processors = os.cpu_count() or 1
    most = max(LEAST_MOST, A_PROCESSOR * processors)
    if not 1 <= count <= most:
        raise ValueError(
            f"this machine has {processors} processors and takes 1 to {most} threads, got {reprlib.repr(count)}"
        )
    torch.set_num_threads(count)
