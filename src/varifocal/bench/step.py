"""The progress of a benchmark."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """How many of all steps are done, and what is being done now."""

    done: int
    total: int
    doing: str
