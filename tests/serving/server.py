"""`vllm serve` as a process of its own, on a port of this machine that was free."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

STARTS_WITHIN = 600
"""Seconds; some thirty are usual, on a machine with nothing else to do."""


@dataclass(frozen=True)
class Server:
    """One that answers."""

    process: subprocess.Popen[bytes]
    address: str
    log: Path

    def get(self, path: str) -> str:
        """What it says to a plain request."""
        with urllib.request.urlopen(f"{self.address}{path}", timeout=60) as answer:
            content: bytes = answer.read()
        return content.decode()

    def is_healthy(self) -> bool:
        """Whether it answers."""
        try:
            self.get("/health")
        except (OSError, urllib.error.URLError):
            return False
        return True

    def counter(self, name: str) -> float:
        """The sum of one of vLLM's own figures over its labels."""
        lines = self.get("/metrics").splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def last_words(self) -> str:
        """The end of its log."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-6000:]


@contextmanager
def serving(folder: Path, log: Path, *options: str) -> Iterator[Server]:
    """A server of a folder, started as a user starts it; its log is shown where it does not start."""
    server = started(folder, log, options)
    try:
        yield server
    finally:
        stop(server.process)


def started(folder: Path, log: Path, options: tuple[str, ...], *, tries: int = 3) -> Server:
    """A server that answers; another port is tried if somebody else took it in between."""
    server = Server(*launched(folder, log, options), log)
    until = time.monotonic() + STARTS_WITHIN
    while not server.is_healthy():
        if server.process.poll() is None and time.monotonic() < until:
            time.sleep(0.5)
            continue
        stop(server.process)
        if tries > 1 and "Address already in use" in server.last_words():
            return started(folder, log, options, tries=tries - 1)
        raise AssertionError(f"vllm serve did not start (exit code {server.process.poll()}):\n{server.last_words()}")
    return server


def launched(folder: Path, log: Path, options: tuple[str, ...]) -> tuple[subprocess.Popen[bytes], str]:
    """The process, and where it will listen."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    command = [str(Path(sys.executable).parent / "vllm"), "serve", str(folder), "--host", "127.0.0.1"]
    # Other tests keep the engine in their process and quiet; a server is as it is.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    kept |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port), *options],
            stdout=output, stderr=subprocess.STDOUT, env=kept, start_new_session=True,
        )  # fmt: skip
    return process, f"http://127.0.0.1:{port}"


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and the processes that it started."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=60)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
