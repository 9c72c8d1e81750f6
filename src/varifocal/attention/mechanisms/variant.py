"""A mechanism in sizes that make short texts interesting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    """Options of a mechanism for texts of some thirty tokens."""

    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    """What tells it from the mechanism's other variants; empty for the main one."""
