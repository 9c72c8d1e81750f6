"""Records as files: they are written beside and renamed, and a reader says in one sentence what is wrong."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Self

from varifocal.results.record import Record


@dataclass(frozen=True, kw_only=True)
class FileRecord(Record):
    """A record that is a JSON file of its own."""

    filename: ClassVar[str] = ""
    """Its name in the folder that it belongs to; empty if the user names it."""
    what: ClassVar[str]
    """What it is, for messages: the summary of a run, a result of 'varifocal compare'."""
    remedy: ClassVar[str] = ""
    """What to do about a file that is something else."""
    indent: ClassVar[int | None] = 1
    ascii: ClassVar[bool] = True

    @classmethod
    def read(cls, path: Path) -> Self:
        """The record in a file; ValueError unless the file holds one."""
        content = read_json(path, what=cls.what)
        if not isinstance(content, dict) or (cls.tag and content.get(cls.tag[0]) != cls.tag[1]):
            raise ValueError(f"{path} is not {cls.what}" + (f"; {cls.remedy}" if cls.remedy else ""))
        with explained(path, what=cls.what):
            return cls.from_json(content)

    def write(self, path: Path) -> None:
        """Write the file whole, or leave it as it was."""
        write_whole(path, json.dumps(self.to_json(), indent=self.indent, ensure_ascii=self.ascii) + "\n")


@contextmanager
def explained(path: Path, *, what: str) -> Iterator[None]:
    """Adds the file's name to errors about its content."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"cannot read {path} as {what}; parts are missing or have another type: {error}") from error


def read_json(path: Path, *, what: str) -> Any:
    """The plain values in a JSON file; ValueError if it cannot be read, is cut off or is nested too deeply."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path} as {what}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"cannot read {path} as {what}: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ValueError(f"cannot read {path} as {what}: it is nested too deeply") from error


def inside(folder: Path, name: object, *, said: Path) -> Path:
    """The file of a name that the file `said` gives; ValueError unless it is inside the folder.

    By its name alone: a link in the folder may lead elsewhere, as those of the hub's cache do.
    """
    parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    if not parts or parts[0].startswith("/") or ".." in parts or "\0" in str(name):
        raise ValueError(f"{said} names the file {name!r}, which is not inside {folder}; do not use it")
    return folder.joinpath(*parts)


def read_toml(path: Path, *, what: str) -> dict[str, Any]:
    """The tables of a TOML file; ValueError if it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {path} as {what}: {error}") from error


def write_whole(path: Path, content: str | bytes) -> None:
    """Write beside `path`, flush to disk, then rename over it: the file is either the old one or the whole new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def require_folder(path: Path | None) -> None:
    """ValueError unless the folder of a file to be written exists: it is better to fail now than after the work."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ValueError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")
