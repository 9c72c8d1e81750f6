"""Sinks, the first tokens of a document that stay readable beside a window: Xiao et al., arXiv:2309.17453."""

from __future__ import annotations

from varifocal.equations.branches import Branch, Prefix


def with_sinks(window: Branch, sinks: int) -> Branch:
    """One softmax over a window and the first `sinks` tokens of the document; the window alone if there are none."""
    return window | Prefix(sinks) if sinks else window


def words_of_sinks(sinks: int) -> str:
    """What they add to a window's words."""
    return f" and the first {sinks} of the text" if sinks else ""
