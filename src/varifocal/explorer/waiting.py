"""Whether somebody still waits for an answer: what nobody waits for is not computed."""

from __future__ import annotations

import threading
from collections.abc import Callable


class AbandonedError(Exception):
    """Nobody waits for the answer any more."""


class Waiting:
    """One question's wish for an answer, asked by the thread that computes and withdrawn by the one that serves."""

    def __init__(self) -> None:
        self._gone = threading.Event()
        self.done, self.of = 0, 0
        """Layers that were computed, and how many there are; of 0, the question still waits for its turn."""
        self.on_begin: Callable[[], None] = lambda: None
        """Called when the work for this question begins."""

    def begin(self, of: int) -> None:
        """So many layers are going to be computed."""
        self.done, self.of = 0, of
        self.on_begin()

    def step(self) -> None:
        """Another layer is done; AbandonedError if nobody waits."""
        self.require()
        self.done += 1

    def leave(self) -> None:
        """Nobody waits from now on."""
        self._gone.set()

    def require(self) -> None:
        """AbandonedError if nobody waits."""
        if self._gone.is_set():
            raise AbandonedError
