"""Files that are either absent or whole, also after a power failure."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR}


def inside(folder: Path, name: object, *, said: Path) -> Path:
    """The file of a name that the file `said` gives; ValueError unless it lies below the folder.

    By its name alone: a link in the folder may lead elsewhere, for whoever puts a large file on another disk.
    """
    parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    if not parts or parts[0].startswith("/") or ".." in parts or "\0" in str(name):
        raise ValueError(f"{said} names the file {name!r}, which is not inside {folder}; do not use it")
    return folder.joinpath(*parts)


def write_durably(path: Path, text: str) -> None:
    """Write beside `path`, bring it to the disk, then rename over it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        synchronize(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def synchronize(path: Path) -> None:
    """Bring a file's content to the disk, so that a rename cannot become durable before it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def explained(out: Path) -> Iterator[None]:
    """Turn what the system says about a full disk or a forbidden folder into a sentence that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise ValueError(
                f"cannot write to {out}: {error.strerror}; make room and run the same command again, it goes on "
                "where it stopped"
            ) from error
        if error.errno in FORBIDDEN:
            raise ValueError(f"cannot write to {out}: {error.strerror}; choose a folder that you may write") from error
        raise
