"""Files that are either the old one or the whole new one, never half of it."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write beside `path`, then rename over it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def require_folder(path: Path) -> None:
    """ValueError unless the file's folder exists: better now than after the work."""
    if not path.absolute().parent.is_dir():
        raise ValueError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")
