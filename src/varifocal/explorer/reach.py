"""What of a mechanism's reading the page can draw, asked of its equation."""

from __future__ import annotations

from typing import Any, NamedTuple

from varifocal.attention.mechanisms import Mechanism
from varifocal.attention.mechanisms.base import typical_equation
from varifocal.equations.branches import SoftWindow, Window, members


class Reach(NamedTuple):
    """The near branch of a mechanism."""

    window: int | None = None
    """Keys of the window that all its tokens share, their own included."""
    edge: int = 0
    """Keys over which a window fades out."""


def reach_of(mechanism: Mechanism[Any], head: int) -> Reach:
    """The window of a head."""
    for member in members(typical_equation(mechanism, 1).branches[0]):
        if isinstance(member, Window):
            size = member.size[head] if isinstance(member.size, tuple) else member.size
            # A window of 1 is the query's own key, beside those that were selected.
            return Reach(size if size is not None and size > 1 else None)
        if isinstance(member, SoftWindow):
            return Reach(edge=round(member.edge))
    return Reach()
