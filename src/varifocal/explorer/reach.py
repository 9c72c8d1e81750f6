"""The window of a mechanism, which the page draws; its equation tells."""

from __future__ import annotations

from typing import Any, NamedTuple

from varifocal.attention.mechanisms import Mechanism
from varifocal.attention.mechanisms.base import typical_equation
from varifocal.equations.branches import SoftWindow, Window, members


class Reach(NamedTuple):
    """The near branch of a mechanism."""

    window: int | None = None
    """Keys of the window, the token's own included, if all tokens share one size."""
    edge: int = 0
    """Keys over which a window fades out."""


def reach_of(mechanism: Mechanism[Any], head: int) -> Reach:
    """The window of a head."""
    for member in members(typical_equation(mechanism, 1).branches[0]):
        if isinstance(member, Window):
            size = member.size[head] if isinstance(member.size, tuple) else member.size
            # A window of 1 only adds the query's own key to the selected ones; there is nothing to draw.
            return Reach(size if size is not None and size > 1 else None)
        if isinstance(member, SoftWindow):
            return Reach(edge=round(member.edge))
    return Reach()
