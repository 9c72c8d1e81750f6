"""Where a benchmark stands, for a progress bar."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """So many steps of all are done, and what is being done now."""

    done: int
    total: int
    doing: str
