"""What a measurement must carry to mean anything: machine, versions, commit, command."""

from __future__ import annotations

import datetime
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

from varifocal.results.environment import Environment


def environment() -> Environment:
    """The machine and software of this process."""
    return Environment(
        time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=command(),
        commit=commit(),
        processor=processor(),
        threads=torch.get_num_threads(),
        vector_units=torch.backends.cpu.get_cpu_capability(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        system=f"{platform.system()} {platform.machine()}",
    )


def command() -> str:
    """What was typed, without the folders of absolute paths: what is published tells of no one's disk."""
    return shlex.join([Path(sys.argv[0]).name, *(Path(w).name if Path(w).is_absolute() else w for w in sys.argv[1:])])


def place_and_versions(place: torch.device) -> str:
    """A GPU by name and capability, and what runs on it, in a few words."""
    from varifocal.device import find_device

    name = find_device(place).description
    if place.type == "cuda":
        name += f" (sm_{''.join(map(str, torch.cuda.get_device_capability(place)))})"
    ours = commit() or version_of("varifocal")
    return f"{name}, torch {torch.__version__}, triton {version_of('triton')}, varifocal {ours}"


def version_of(package: str) -> str:
    """The version of an installed package, or "none"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def processor() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":") for line in lines)
    fields = {name.strip(): value.strip() for name, _, value in named}
    details = [fields.get("model name", platform.machine())]
    if "model" in fields:
        details.append(f"family {fields.get('cpu family', '?')} model {fields['model']}")
    return ", ".join(details)


def commit() -> str | None:
    """The commit of the checkout that this package lies in, with a + for uncommitted changes; None outside of one."""
    folder = Path(__file__).parent
    try:
        revision, changes = (
            subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
            for words in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return revision + ("+" if changes else "")
