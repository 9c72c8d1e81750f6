"""The memory of this process, and processes of their own to measure it in."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def reset_peak() -> None:
    """Let the kernel's record of the peak begin anew (Linux); elsewhere the peak is that of the whole process."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_bytes() -> int:
    """The highest resident size since the last reset."""
    fields = status_fields()
    if "VmHWM" in fields:
        return fields["VmHWM"]
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_bytes() -> int:
    """The present resident size."""
    fields = status_fields()
    return fields["VmRSS"] if "VmRSS" in fields else peak_bytes()


def status_fields() -> dict[str, int]:
    """The sizes in /proc/self/status, in bytes; nothing where there is no such file."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}


def in_own_process(
    module: str,
    task: dict[str, object],
    *,
    timeout: float,
    environment: Mapping[str, str] | None = None,
    python: str | None = None,
) -> dict[str, object]:
    """Run `python -m module` with the task as JSON on its standard input, and read JSON from its last line.

    `environment` is laid over this process's own; `python` is the interpreter, None for this one.

    ValueError with the process's own last words if it fails.
    """
    process = subprocess.run(
        [python or sys.executable, "-m", module],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | dict(environment or {}),
        check=False,
    )
    if process.returncode != 0:
        words = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
        raise ValueError(words[-1])
    answer: dict[str, object] = json.loads(process.stdout.strip().splitlines()[-1])
    return answer
