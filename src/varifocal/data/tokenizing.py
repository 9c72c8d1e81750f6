"""Documents to `.ds` and `.index` files, split by split: datatrove's tokenizer, with files that appear whole or not."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
from datatrove.pipeline.tokens.tokenizer import DocumentTokenizer, TokenizedFile

from varifocal.data.checksums import file_checksums
from varifocal.data.files import explained, inside, synchronize, write_durably
from varifocal.data.manifest import FileEntry, Shard, entry_from, part
from varifocal.data.splits import Splits
from varifocal.data.tokenizers import TextTokenizer, first_line, load_tokenizer

BATCH_CHARACTERS, BATCH_DOCUMENTS = 1 << 21, 1000
"""What is tokenized in one call: as the tokenizer needs some 200 bytes a token, this bounds memory to 100 MB or so."""
REPORT_EVERY = 0.25
"""Seconds between two reports of a task."""


@dataclass
class PieceResult:
    """What became of one piece."""

    shards: dict[str, Shard] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    empty: int = 0
    replaced: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def read_result(path: Path) -> PieceResult:
    """The result that a task wrote; ValueError if it is something else, or names a file outside of the data set."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        shards, files = part(content, "shards", dict), part(content, "files", dict)
        result = PieceResult(
            shards={split: entry_from(Shard, shard, f"shard {split!r}") for split, shard in shards.items()},
            files={name: entry_from(FileEntry, entry, f"file {name!r}") for name, entry in files.items()},
            empty=part(content, "empty", int),
            replaced=part(content, "replaced", int),
        )
        for name in (*result.files, *(shard.name for shard in result.shards.values())):
            inside(path.parents[2], name, said=path)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not the result of a piece ({first_line(error)}); remove the folder") from error
    return result


class SplitTokenizer(DocumentTokenizer):
    """Writes the documents of a task to a shard for each split, in their order, and then the result of the task."""

    name = "✍️ Splits"

    def __init__(self, out: Path, *, tokenizer_name: str, end_token: str, splits: Splits, parallel: bool) -> None:
        super().__init__(str(out), str(out / "tokenizer.json"), shuffle_documents=False)
        self.out, self.tokenizer_name, self.end_token = out, tokenizer_name, end_token
        self.splits, self.parallel = splits, parallel

    @cached_property
    def text_tokenizer(self) -> TextTokenizer:
        return load_tokenizer(self.out / "tokenizer.json", name=self.tokenizer_name, end_token=self.end_token)

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        # One core for each task: threads within a tokenizer help only a task that is alone.
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if self.parallel else "false"
        state = self.out / "preparation"
        with explained(self.out):
            for folder in ("tasks", "results", "progress"):
                (state / folder).mkdir(parents=True, exist_ok=True)
            work = Path(tempfile.mkdtemp(prefix=f"{rank:05d}.", dir=state / "tasks"))
            try:
                result = self._write(data, rank, work)
                write_durably(state / "results" / f"{rank:05d}.json", json.dumps(result.as_json()))
            finally:
                shutil.rmtree(work, ignore_errors=True)

    def _write(self, data: Iterable[Any], rank: int, work: Path) -> PieceResult:
        result = PieceResult()
        writers: dict[str, ShardWriter] = {}
        progress = TaskProgress(self.out / "preparation" / "progress" / f"{rank:05d}.json")
        for batch in batches(data):
            texts = [document.text for document in batch if document.text]
            result.empty += len(batch) - len(texts)
            result.replaced += sum(bool(document.metadata["replaced"]) for document in batch)
            with self.track_time(unit="batch"):
                encoded = self.text_tokenizer.encode_batch(texts)
            for text, tokens in zip(texts, encoded, strict=True):
                content = text.encode("utf-8")
                split = self.splits.of(content)
                if split not in writers:
                    writers[split] = ShardWriter(work / split, f"{rank:05d}.ds", self.text_tokenizer)
                writers[split].write(tokens, len(content))
                self.stat_update("tokens", value=len(tokens) + 1)
                progress.add(len(tokens) + 1, len(content))
        for split, writer in writers.items():
            writer.close()
            result.shards[split] = writer.move(self.out, split, result.files)
        progress.report()
        return result


class ShardWriter:
    """One shard while it is written: datatrove's `.ds`, `.index` and `.metadata`, and `.bytes` beside them."""

    def __init__(self, folder: Path, name: str, tokenizer: TextTokenizer) -> None:
        self.folder, self.name = folder, name
        self.width = numpy.dtype("<u2" if tokenizer.token_bytes == 2 else "<u4")
        self.end = numpy.array([tokenizer.end], dtype=self.width)
        self.file = TokenizedFile(
            str(folder),
            name,
            tokenizer_name_or_path=tokenizer.name,
            save_final_metadata=True,
            token_size=tokenizer.token_bytes,
        )
        self.byte_ends: list[int] = []
        self.bytes = 0

    def write(self, tokens: numpy.typing.NDArray[Any], size: int) -> None:
        """A document: its tokens, its end, and the bytes of its text."""
        self.file.write_bytes(numpy.concatenate((tokens.astype(self.width), self.end)).tobytes())
        self.bytes += size
        self.byte_ends.append(self.bytes)

    def close(self) -> None:
        self.file.close()
        numpy.array(self.byte_ends, dtype="<u8").tofile(self.folder / f"{self.name}.bytes")

    def move(self, out: Path, split: str, files: dict[str, FileEntry]) -> Shard:
        """Bring the files to the disk and to their place, and enter them with their checksums."""
        (out / split).mkdir(exist_ok=True)
        for ending in ("", ".index", ".metadata", ".bytes"):
            path = self.folder / f"{self.name}{ending}"
            synchronize(path)
            files[f"{split}/{path.name}"] = FileEntry(size=path.stat().st_size, checksums=file_checksums(path))
            path.replace(out / split / path.name)
        return Shard(
            name=f"{split}/{self.name}", documents=len(self.byte_ends), tokens=len(self.file), bytes=self.bytes
        )


class TaskProgress:
    """Tells the process that started the task how far it is, through a small file."""

    def __init__(self, path: Path) -> None:
        self.path, self.documents, self.tokens, self.bytes = path, 0, 0, 0
        self.reported = time.monotonic()

    def add(self, tokens: int, size: int) -> None:
        self.documents, self.tokens, self.bytes = self.documents + 1, self.tokens + tokens, self.bytes + size
        if time.monotonic() - self.reported > REPORT_EVERY:
            self.report()

    def report(self) -> None:
        self.reported = time.monotonic()
        # Renamed into place: the watching process never reads half a report.
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        beside.write_text(json.dumps([self.documents, self.tokens, self.bytes]), encoding="utf-8")
        beside.replace(self.path)


def batches(documents: Iterable[Any]) -> Iterator[list[Any]]:
    """Documents in groups that together are not too long for one call; a very long one is a group by itself."""
    batch: list[Any] = []
    characters = 0
    for document in documents:
        if batch and (characters + len(document.text) > BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS):
            yield batch
            batch, characters = [], 0
        batch.append(document)
        characters += len(document.text)
    if batch:
        yield batch
