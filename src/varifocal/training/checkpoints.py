"""Checkpoints that are whole or not there: written aside, sealed with checksums, renamed; and the newest whole one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from varifocal.data.checksums import file_checksums
from varifocal.data.files import synchronize
from varifocal.results.checkpoint import CheckpointState, Seal, SealedFile
from varifocal.results.files import inside

PREFIX = "step-"


class Checkpoint(NamedTuple):
    """A whole checkpoint."""

    path: Path
    step: int
    state: CheckpointState
    """What the run wrote into the seal."""


def seal(writing: Path, checkpoint: Path, state: CheckpointState) -> None:
    """Make the finished folder `writing` the checkpoint: bring it to the disk, note its checksums, rename it."""
    files: dict[str, SealedFile] = {}
    for path in sorted(path for path in writing.rglob("*") if path.is_file()):
        synchronize(path)
        files[str(path.relative_to(writing))] = SealedFile(size=path.stat().st_size, checksums=file_checksums(path))
    Seal(state=state, files=files).write(writing / Seal.filename)
    discard(checkpoint)
    writing.rename(checkpoint)
    # A rename is on the disk only once the folder that holds the name is.
    synchronize_folder(checkpoint.parent)


def newest_whole(folder: Path, *, on_damaged: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is as it was written; each newer one is reported with what is wrong with it.

    None if there are no checkpoints; ValueError if there are some and none is whole.
    """
    found = checkpoint_paths(folder)
    problems = []
    for step, path in reversed(found):
        found_seal, problem = examined(path)
        if found_seal is not None:
            return Checkpoint(path, step, found_seal.state)
        problems.append(f"{path} {problem}")
        on_damaged(f"the checkpoint {problems[-1]}; it is skipped")
    if problems:
        raise ValueError(
            f"none of the {len(found)} checkpoints in {folder} is whole: {problems[0]}; remove the folder to start "
            "from the beginning"
        )
    return None


def examined(path: Path) -> tuple[Seal | None, str]:
    """The seal of a checkpoint that is whole, or None and what is wrong with it."""
    try:
        seal = Seal.read(path / Seal.filename)
    except ValueError as error:
        return None, f"is damaged: {Seal.filename} cannot be read ({error})"
    for name, entry in seal.files.items():
        try:
            file = inside(path, name, said=path / Seal.filename)
        except ValueError as error:
            return None, f"is damaged: {error}"
        if not file.is_file():
            return None, f"is damaged: {name} is missing"
        if file.stat().st_size != entry.size:
            return None, f"is damaged: {name} has {file.stat().st_size} bytes where {entry.size} were written"
        if file_checksums(file) != entry.checksums:
            return None, f"is damaged: the checksum of {name} differs"
    return seal, ""


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
    """Remove what an interrupted write or removal left."""
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
