"""Kernels know branches and scores by their types: what differs must be of a type of its own."""

from __future__ import annotations


def refuse_known_parents(kind: type, *bases: str) -> None:
    """TypeError if a class extends a kind of ours that kernels know, which would then run in its parent's place."""
    for parent in kind.__bases__:
        if parent.__module__.startswith("varifocal.equations.") and parent.__name__ not in bases:
            raise TypeError(
                f"{kind.__name__} cannot extend {parent.__name__}, which kernels take for what it says itself; "
                f"extend {' or '.join(bases)}"
            )
