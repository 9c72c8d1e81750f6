"""What some steps of a contender took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """In all, for several steps."""

    seconds: float
    processor_seconds: float
    """Over all threads."""
