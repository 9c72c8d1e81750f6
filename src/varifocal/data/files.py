"""Files that are either absent or whole, also after a power failure."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR}


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
