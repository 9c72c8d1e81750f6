"""A data set written from arrays in memory: the format of a prepared one, for texts that are made and not read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from varifocal.data.checksums import file_checksums
from varifocal.data.files import explained, synchronize, write_durably
from varifocal.data.manifest import FileEntry, Shard, SplitEntry, assemble, write_manifest
from varifocal.data.splits import SPLITS
from varifocal.data.tokenizers import TextTokenizer


class SplitArrays(NamedTuple):
    """The documents of a split."""

    tokens: NDArray[Any]
    """[N], the end of every document included."""
    ends: NDArray[numpy.int64]
    """[D]: the token after each document's last."""
    byte_ends: NDArray[numpy.int64]
    """[D]: the same, in bytes of text."""
    answers: NDArray[numpy.int64] | None = None
    """[Q, 2]: answers and distances of a probe, ascending."""


def write_arrays(
    out: Path, splits: Mapping[str, SplitArrays], *, kind: str, source: dict[str, Any], tokenizer: TextTokenizer
) -> None:
    """Write a data set beside `out`, then rename it: it appears whole or not at all."""
    folder = out.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{out} already exists; choose another folder or remove it")
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        with explained(folder):
            beside.mkdir(parents=True)
            write_durably(beside / "tokenizer.json", tokenizer.raw.to_str(pretty=False))
            files: dict[str, FileEntry] = {}
            entries = {
                name: SplitEntry(shards=write_shard(beside, name, splits[name], tokenizer, files))
                if name in splits
                else SplitEntry()
                for name in SPLITS
            }
            write_manifest(beside, assemble(beside, kind, source, tokenizer, entries, files, {}))
            beside.replace(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def write_shard(
    folder: Path, split: str, arrays: SplitArrays, tokenizer: TextTokenizer, files: dict[str, FileEntry]
) -> tuple[Shard, ...]:
    """The only shard of a split; none for a split without documents."""
    if not len(arrays.ends):
        return ()
    (folder / split).mkdir()
    name = f"{split}/00000.ds"
    content = {
        name: arrays.tokens.astype("<u2" if tokenizer.token_bytes == 2 else "<u4"),
        f"{name}.index": arrays.ends.astype("<u8"),
        f"{name}.bytes": arrays.byte_ends.astype("<u8"),
    }
    if arrays.answers is not None:
        content[f"{name}.answers"] = arrays.answers.astype("<i8")
    for path, array in content.items():
        array.tofile(folder / path)
        synchronize(folder / path)
        files[path] = FileEntry(size=array.nbytes, checksums=file_checksums(folder / path))
    return (Shard(name=name, documents=len(arrays.ends), tokens=len(arrays.tokens), bytes=int(arrays.byte_ends[-1])),)
