"""The processes that another one started, and whether they still live."""

from __future__ import annotations

import random
import socket
import time
from contextlib import suppress
from pathlib import Path

PATIENCE = 600
"""Seconds after which a test gives up on a process: far more than a busy machine takes, and no test measures time."""


def family_of(process: int) -> list[tuple[int, str]]:
    """All that a process started, and what these started: number and time of birth, which no later process shares."""
    found, waiting = [], [process]
    while waiting:
        numbers = children_of(waiting.pop())
        waiting += numbers
        found += [(number, birth(number)) for number in numbers]
    return found


def children_of(process: int) -> list[int]:
    """What a process started and has not buried; nothing for one that is gone."""
    found: list[int] = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        # A thread may end between the list and the look.
        with suppress(OSError):
            found += map(int, file.read_text().split())
    return found


def birth(process: int) -> str:
    """When a process was started, and "" for one that is gone or only waits to be buried."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def still_alive(family: list[tuple[int, str]]) -> list[int]:
    """Those of a family that live, once there was time for all of them to end."""
    deadline = time.monotonic() + PATIENCE
    while left := [number for number, born in family if birth(number) == born != ""]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return left


def free_port() -> int:
    """A port that nobody listens on, out of the range from which the system takes those of outgoing connections."""
    for port in random.sample(range(20_000, 32_000), 200):
        with socket.socket() as one:
            try:
                one.bind(("localhost", port))
            except OSError:
                continue
            return port
    raise AssertionError("found no free port")
