"""Checkpoints that are whole or not there: written aside, sealed with checksums, renamed; and the newest whole one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from varifocal.data.checksums import file_checksums
from varifocal.data.files import synchronize, write_durably

SEAL = "complete.json"
"""Written last: sizes and checksums of all other files, and what the run remembers besides them."""
PREFIX = "step-"


class Checkpoint(NamedTuple):
    """A whole checkpoint."""

    path: Path
    step: int
    state: dict[str, Any]
    """What the run wrote into the seal."""


def seal(writing: Path, checkpoint: Path, state: dict[str, Any]) -> None:
    """Make the finished folder `writing` the checkpoint: bring it to the disk, note its checksums, rename it."""
    files = {}
    for path in sorted(path for path in writing.rglob("*") if path.is_file()):
        synchronize(path)
        files[str(path.relative_to(writing))] = {"size": path.stat().st_size, "checksums": file_checksums(path)}
    write_durably(writing / SEAL, json.dumps({"state": state, "files": files}) + "\n")
    discard(checkpoint)
    writing.rename(checkpoint)
    synchronize_folder(checkpoint.parent)


def newest_whole(folder: Path, *, on_damaged: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is as it was written; each newer one is reported with what is wrong with it.

    None if there are no checkpoints; ValueError if there are some and none is whole.
    """
    found = checkpoint_paths(folder)
    problems = []
    for step, path in reversed(found):
        content, problem = examined(path)
        if problem is None:
            return Checkpoint(path, step, content["state"])
        problems.append(f"{path} {problem}")
        on_damaged(f"the checkpoint {problems[-1]}; it is skipped")
    if problems:
        raise ValueError(
            f"none of the {len(found)} checkpoints in {folder} is whole: {problems[0]}; remove the folder to start "
            "from the beginning"
        )
    return None


def examined(path: Path) -> tuple[dict[str, Any], str | None]:
    """What the seal of a checkpoint says, and what is wrong with the files, if anything is."""
    try:
        content = json.loads((path / SEAL).read_text(encoding="utf-8"))
        files = content["files"]
        for name, entry in files.items():
            file = path / name
            if not file.is_file():
                return content, f"is damaged: {name} is missing"
            if file.stat().st_size != entry["size"]:
                return content, f"is damaged: {name} has {file.stat().st_size} bytes where {entry['size']} were written"
            if file_checksums(file) != entry["checksums"]:
                return content, f"is damaged: the checksum of {name} differs"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, f"is damaged: {SEAL} cannot be read ({' '.join(str(error).split())})"
    return content, None


def checkpoint_paths(folder: Path) -> list[tuple[int, Path]]:
    """Step and folder of every checkpoint, the oldest first."""
    if not folder.is_dir():
        return []
    named = [(path.name.removeprefix(PREFIX), path) for path in folder.iterdir() if path.name.startswith(PREFIX)]
    return sorted((int(number), path) for number, path in named if number.isdecimal() and path.is_dir())


def remove_old(folder: Path, *, keep: int) -> None:
    """Remove all checkpoints but the newest `keep`."""
    found = checkpoint_paths(folder)
    for _, path in found[: max(0, len(found) - keep)]:
        discard(path)


def remove_unfinished(folder: Path) -> None:
    """Remove what an interrupted write or removal left behind."""
    for path in folder.glob(".*") if folder.is_dir() else ():
        shutil.rmtree(path, ignore_errors=True)


def discard(path: Path) -> None:
    """Remove a folder in one step as far as its name goes, so that half of it is never taken for a checkpoint."""
    if path.exists():
        aside = path.with_name(f".{path.name}.removed")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def synchronize_folder(folder: Path) -> None:
    """Bring a folder's list of names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
