"""Whether somebody still waits for an answer: what nobody waits for is not computed."""

from __future__ import annotations

import threading


class AbandonedError(Exception):
    """Nobody waits for the answer any more."""


class Waiting:
    """One question's wish for an answer, asked by the thread that computes and withdrawn by the one that serves."""

    def __init__(self) -> None:
        self._gone = threading.Event()

    def leave(self) -> None:
        """Nobody waits from now on."""
        self._gone.set()

    def require(self) -> None:
        """AbandonedError if nobody waits."""
        if self._gone.is_set():
            raise AbandonedError
