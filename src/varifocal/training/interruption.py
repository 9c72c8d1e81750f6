"""A request to stop: SIGTERM, which clusters send before they take a machine away, and Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any


class StoppedError(Exception):
    """The run was asked to stop, and did so after a checkpoint."""


@dataclass
class StopRequest:
    """Whether somebody asked for the end."""

    received: bool = False


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Notes the first SIGTERM or SIGINT instead of dying of it; the second one does what it always did."""
    request = StopRequest()
    # Python lets only the main thread set signal handlers.
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        request.received = True
        signal.signal(number, before[number])

    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, note)
    try:
        yield request
    finally:
        for known, handler in before.items():
            signal.signal(known, handler)
