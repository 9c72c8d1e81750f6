"""A prepared data set, opened: verified, memory-mapped, split by split."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy
from numpy.typing import NDArray

from varifocal.data.checksums import CheckedFile, DamagedDataError
from varifocal.data.manifest import Manifest, Shard, read_manifest
from varifocal.data.packing import PackedRows

if TYPE_CHECKING:
    from varifocal.data.tokenizers import TextTokenizer

Verify = Literal["auto", "full"]
AT_ONCE = 1 << 28
"""Up to so many bytes of tokens (256 MiB, about a third of a second) everything is verified at open."""


class Answers(NamedTuple):
    """The questions of a probe: where the answers stand and how far back their facts are."""

    tokens: NDArray[numpy.int64]
    """[N]: the index of the answer within the split; the token before it is the question."""
    distances: NDArray[numpy.int64]
    """[N]: from the question back to the same key in its fact."""


class PreparedData:
    """A data set on disk; see `open_data`."""

    def __init__(self, folder: Path, manifest: Manifest, *, verify: Verify) -> None:
        self.folder, self.manifest = folder, manifest
        self._files = {
            name: CheckedFile(folder / name, size=entry.size, checksums=entry.checksums)
            for name, entry in manifest.files.items()
        }
        tokens = sum(entry.size for name, entry in manifest.files.items() if name.endswith(".ds"))
        for name, file in self._files.items():
            if verify == "full" or tokens <= AT_ONCE or not name.endswith(".ds"):
                file.require_all()
            else:
                file.require_ends()
        self._splits = {
            name: TokenSplit(name, [self._open(shard) for shard in entry.shards], end=manifest.tokenizer.end)
            for name, entry in manifest.splits.items()
        }

    @property
    def fingerprint(self) -> str:
        """Stands for tokens, splits and tokenizer; the same wherever the same data were prepared."""
        return self.manifest.fingerprint

    def split(self, name: str) -> TokenSplit:
        """train, validation or test."""
        if name not in self._splits:
            raise ValueError(f"unknown split {name!r}; known are {', '.join(self._splits)}")
        return self._splits[name]

    def tokenizer(self) -> TextTokenizer:
        """The tokenizer that made the tokens."""
        from varifocal.data.tokenizers import load_tokenizer

        entry = self.manifest.tokenizer
        tokenizer = load_tokenizer(self.folder / entry.file, name=entry.name, end_token=entry.end_token)
        if tokenizer.fingerprint != entry.fingerprint:
            raise DamagedDataError(
                f"{self.folder / entry.file} is not the tokenizer of this data set; prepare it again"
            )
        return tokenizer

    def require_tokenizer(self, fingerprint: str, *, whose: str = "the model") -> None:
        """ValueError unless `whose` tokens mean the same as ours: compare what the model was trained with."""
        entry = self.manifest.tokenizer
        if fingerprint != entry.fingerprint:
            raise ValueError(
                f"{whose} uses a tokenizer of fingerprint {fingerprint[:12]}, the data {self.folder} were made with "
                f"{entry.name!r} of fingerprint {entry.fingerprint[:12]}; prepare the data with the same tokenizer"
            )

    def _open(self, shard: Shard) -> OpenShard:
        width: type[numpy.unsignedinteger] = numpy.uint16 if self.manifest.token_bytes == 2 else numpy.uint32
        file, index, sizes = (self._files[f"{shard.name}{ending}"] for ending in ("", ".index", ".bytes"))
        if file.size != shard.tokens * self.manifest.token_bytes or not index.size == sizes.size == shard.documents * 8:
            raise DamagedDataError(f"{file.path} does not hold what the manifest says; prepare it again")
        ends, byte_ends = (one.content.view("<u8").view(numpy.int64) for one in (index, sizes))
        if not ascends(ends, least=1) or not ascends(byte_ends, least=0):
            raise DamagedDataError(f"the index of {file.path} does not ascend; prepare it again")
        if ends[-1] != shard.tokens or byte_ends[-1] != shard.bytes:
            raise DamagedDataError(f"the index of {file.path} does not end where its tokens end; prepare it again")
        answers = self._files.get(f"{shard.name}.answers")
        if answers is not None:
            self._check_answers(answers, shard)
        return OpenShard(
            file=file,
            tokens=file.content.view(numpy.dtype(width).newbyteorder("<")),
            ends=ends,
            byte_ends=byte_ends,
            answers=None if answers is None else answers.content.view("<i8").reshape(-1, 2),
            vocabulary=self.manifest.tokenizer.vocabulary,
        )

    def _check_answers(self, file: CheckedFile, shard: Shard) -> None:
        """DamagedDataError unless every answer stands behind its question, and the question behind its fact."""
        whole = file.size % 16 == 0
        pairs = file.content.view("<i8").reshape(-1, 2) if whole else numpy.empty((0, 2), dtype=numpy.int64)
        tokens, distances = pairs[:, 0], pairs[:, 1]
        if not whole or not (
            bool((numpy.diff(tokens) > 0).all())
            and bool((distances > 0).all())
            and bool((tokens > distances).all())
            and bool((tokens < shard.tokens).all())
        ):
            raise DamagedDataError(f"{file.path} does not name the answers of its tokens; prepare it again")


class OpenShard(NamedTuple):
    """The arrays of one shard, memory-mapped."""

    file: CheckedFile
    tokens: NDArray[numpy.unsignedinteger]
    ends: NDArray[numpy.int64]
    """For each document, the token after its last."""
    byte_ends: NDArray[numpy.int64]
    """The same, in UTF-8 bytes of its text."""
    answers: NDArray[numpy.int64] | None
    """[N, 2]: answer and distance, for a probe."""
    vocabulary: int
    """One more than the largest token."""

    def read(self, begin: int, end: int) -> NDArray[numpy.unsignedinteger]:
        """The tokens begin to end, verified; a view of the file."""
        width = self.tokens.itemsize
        self.file.require(begin * width, end * width)
        found = self.tokens[begin:end]
        if len(found) and int(found.max()) >= self.vocabulary:
            raise DamagedDataError(
                f"{self.file.path} holds the token {int(found.max())}, its tokenizer has {self.vocabulary}; prepare it "
                "again"
            )
        return found


class TokenSplit:
    """The documents of a split, one after the other: a long row of tokens with a mark after every document."""

    def __init__(self, name: str, shards: list[OpenShard], *, end: int) -> None:
        self.name, self.shards, self.end = name, shards, end
        self.token_offsets = offsets([len(shard.tokens) for shard in shards])
        self.document_offsets = offsets([len(shard.ends) for shard in shards])
        self.bytes = sum(int(shard.byte_ends[-1]) for shard in shards)
        """UTF-8 bytes of the text of all documents."""

    @property
    def tokens(self) -> int:
        """All tokens, the end of each document included."""
        return int(self.token_offsets[-1])

    @property
    def documents(self) -> int:
        return int(self.document_offsets[-1])

    def rows(self, *, length: int, joined: bool = False, padded: bool = False) -> PackedRows:
        """Rows of `length` tokens; see `PackedRows`."""
        return PackedRows(self, length=length, joined=joined, padded=padded)

    def document(self, number: int) -> NDArray[numpy.int64]:
        """The tokens of one document, its end included."""
        shard, local = self._locate(number)
        begin = int(shard.ends[local - 1]) if local else 0
        return shard.read(begin, int(shard.ends[local])).astype(numpy.int64)

    def document_bytes(self, number: int) -> int:
        """UTF-8 bytes of the text of one document."""
        shard, local = self._locate(number)
        return int(shard.byte_ends[local]) - (int(shard.byte_ends[local - 1]) if local else 0)

    def document_lengths(self) -> Iterator[NDArray[numpy.int64]]:
        """The number of tokens of every document, a part of them at a time."""
        for shard in self.shards:
            previous = 0
            for begin in range(0, len(shard.ends), 1 << 20):
                part = shard.ends[begin : begin + (1 << 20)]
                yield numpy.diff(part, prepend=previous)
                previous = int(part[-1])

    def bits_per_byte(self, nats_per_token: float) -> float:
        """A mean loss in nats a token, as bits for each UTF-8 byte: comparable between tokenizers and languages."""
        if not self.bytes:
            raise ValueError(f"the split {self.name!r} is empty, it has no bits per byte")
        return nats_per_token / math.log(2) * self.tokens / self.bytes

    @cached_property
    def answers(self) -> Answers | None:
        """The questions of a probe, in the order of the tokens; None for text."""
        found = [
            shard.answers + numpy.array([offset, 0])
            for shard, offset in zip(self.shards, self.token_offsets, strict=False)
            if shard.answers is not None
        ]
        if not found:
            return None
        whole = numpy.concatenate(found)
        return Answers(whole[:, 0], whole[:, 1])

    def _locate(self, number: int) -> tuple[OpenShard, int]:
        if not 0 <= number < self.documents:
            raise IndexError(
                f"a document of split {self.name!r} has a number between 0 and {self.documents - 1}, got {number}"
            )
        index = int(numpy.searchsorted(self.document_offsets, number, side="right")) - 1
        return self.shards[index], number - int(self.document_offsets[index])


def ascends(ends: NDArray[numpy.int64], *, least: int) -> bool:
    """Whether numbers [N], at least one, begin at `least` or above and grow by as much at every step."""
    if not len(ends) or ends[0] < least:
        return False
    steps = range(0, len(ends), 1 << 20)
    return all(bool((numpy.diff(ends[begin : begin + (1 << 20) + 1]) >= least).all()) for begin in steps)


def offsets(counts: list[int]) -> NDArray[numpy.int64]:
    """Where each of the parts begins, and after them the whole: [0, c0, c0 + c1, ...]."""
    return numpy.concatenate(([0], numpy.cumsum(counts, dtype=numpy.int64))).astype(numpy.int64)


def open_data(path: str | Path, *, verify: Verify = "auto") -> PreparedData:
    """Open a prepared data set, verified.

    The manifest, every file's size, all indexes, and the tokens: in full up to 256 MiB; beyond, the first and last
    megabyte of each file at once and every other megabyte when it is first read. `verify="full"` reads everything now.
    DamagedDataError, a ValueError of one sentence, for whatever is truncated, altered or foreign.
    """
    if verify not in ("auto", "full"):
        raise ValueError(f"verify must be 'auto' or 'full', got {verify!r}")
    folder = Path(path)
    return PreparedData(folder, read_manifest(folder), verify=verify)
