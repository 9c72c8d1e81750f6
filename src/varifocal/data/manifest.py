"""The manifest: what a data set holds, from what it was made, and the checksums by which it is verified."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import reprlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from varifocal.data.checksums import CHUNK, DamagedDataError, file_checksums
from varifocal.data.files import inside, write_durably
from varifocal.data.splits import SPLITS

if TYPE_CHECKING:
    from varifocal.data.tokenizers import TextTokenizer

Entry = TypeVar("Entry")
NAME = "manifest.json"
FORMAT = "varifocal data"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size and checksums of one file."""

    size: int
    checksums: str


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One `.ds` file of datatrove with its `.index` and our `.bytes`: a run of documents."""

    name: str
    """Path of the `.ds` file within the data set."""
    documents: int
    tokens: int
    bytes: int
    """UTF-8 bytes of the text."""


@dataclass(frozen=True, kw_only=True)
class SplitEntry:
    """The shards of one split, in order."""

    shards: tuple[Shard, ...] = ()

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)


@dataclass(frozen=True, kw_only=True)
class TokenizerEntry:
    """Which tokenizer made the tokens; it lies beside the manifest."""

    name: str
    file: str
    fingerprint: str
    vocabulary: int
    """One more than the largest token."""
    end_token: str
    end: int
    """The token after every document."""


@dataclass(frozen=True, kw_only=True)
class ProbeSource:
    """What a manifest must say of a probe, for those who measure on it."""

    length: int
    values: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of manifest.json."""

    kind: str
    """"text", or "probe" for synthetic questions."""
    source: dict[str, Any]
    """What was asked for: source, files, options. The same request again finds its work done."""
    tokenizer: TokenizerEntry
    token_bytes: int
    """2 or 4: the width of a token in the `.ds` files."""
    splits: dict[str, SplitEntry]
    files: dict[str, FileEntry]
    skipped: dict[str, int] = field(default_factory=dict)
    """Documents without text, and documents in which invalid bytes were replaced."""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Stands for tokens, their order, splits and tokenizer; not for where or by which versions they were made."""
        content = self.as_json()
        return digest({name: content[name] for name in ("tokenizer", "token_bytes", "splits", "files")})

    def shard_files(self) -> list[str]:
        """The files without which a shard cannot be read."""
        shards = [shard for split in self.splits.values() for shard in split.shards]
        return [f"{shard.name}{ending}" for shard in shards for ending in ("", ".index", ".bytes")]

    def as_json(self) -> dict[str, Any]:
        content: dict[str, Any] = {"format": FORMAT, "version": VERSION, "chunk": CHUNK, **asdict(self)}
        # Totals are for the reader of the file; they follow from the shards.
        for name, split in self.splits.items():
            totals = {"documents": split.documents, "tokens": split.tokens, "bytes": split.bytes}
            content["splits"][name] = totals | content["splits"][name]
        return content


def digest(content: object) -> str:
    """SHA-256 of a plain value, whatever the order of its keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json: the last step of a preparation, which makes the folder a data set."""
    content = json.loads(json.dumps(manifest.as_json()))
    text = json.dumps({"fingerprint": manifest.fingerprint, **content, "checksum": digest(content)}, indent=1)
    write_durably(folder / NAME, text + "\n")


def read_manifest(folder: Path) -> Manifest:
    """ValueError unless the folder holds the manifest of a finished data set, exactly as it was written."""
    path = folder / NAME
    if not path.is_file():
        if (folder / "preparation").is_dir():
            raise ValueError(
                f"the preparation of {folder} was not finished; run the same 'varifocal data prepare' again, it goes "
                "on where it stopped"
            )
        raise ValueError(f"{folder} holds no {NAME}; make a data set with 'varifocal data prepare SOURCE {folder}'")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedDataError(
            f"{path} cannot be read, it is truncated or altered ({error}); prepare it again"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is not the manifest of a varifocal data set")
    if content.get("version") != VERSION or content.get("chunk") != CHUNK:
        raise ValueError(
            f"{path} is of version {content.get('version')!r}, this program reads version {VERSION}; prepare it again"
        )
    wanted = content.pop("checksum", None)
    content.pop("fingerprint", None)
    if digest(content) != wanted:
        raise DamagedDataError(f"{path} was altered after it was written: its checksum differs; prepare it again")
    try:
        manifest = manifest_from(content)
    except ValueError as error:
        raise DamagedDataError(f"{path} is not the manifest of a varifocal data set: {error}") from error
    for name in (*manifest.files, manifest.tokenizer.file):
        inside(folder, name, said=path)
    for name in (manifest.tokenizer.file, *manifest.shard_files()):
        if name not in manifest.files:
            raise DamagedDataError(f"{path} has no checksums of the file {name!r} that it names; prepare it again")
    return manifest


def manifest_from(content: dict[str, Any]) -> Manifest:
    """The manifest of plain values; ValueError that names the first place that does not fit."""
    splits = part(content, "splits", dict)
    found = Manifest(
        kind=part(content, "kind", str),
        source=part(content, "source", dict),
        tokenizer=entry_from(TokenizerEntry, content.get("tokenizer"), "tokenizer"),
        token_bytes=part(content, "token_bytes", int),
        splits={
            name: SplitEntry(
                shards=tuple(
                    entry_from(Shard, shard, f"a shard of {name}")
                    for shard in part(part(splits, name, dict), "shards", list)
                )
            )
            for name in SPLITS
        },
        files={
            name: entry_from(FileEntry, entry, f"file {name!r}") for name, entry in part(content, "files", dict).items()
        },
        skipped=part(content, "skipped", dict),
        versions=part(content, "versions", dict),
    )
    if found.kind not in ("text", "probe") or not isinstance(found.source.get("source", {}), dict):
        raise ValueError(f"the kind {found.kind!r} and the source do not fit together")
    if found.kind == "probe":
        asked = entry_from(ProbeSource, {name: found.source.get(name) for name in ("length", "values")}, "the probe")
        if min(asked.length, asked.values) < 2:
            raise ValueError(f"the probe has a length of {asked.length} and {asked.values} values, expected 2 or more")
    if found.token_bytes not in (2, 4):
        raise ValueError(f"token_bytes must be 2 or 4, got {found.token_bytes}")
    if not found.tokenizer.end < found.tokenizer.vocabulary <= 1 << 8 * found.token_bytes:
        raise ValueError(
            f"the end {found.tokenizer.end}, the vocabulary {found.tokenizer.vocabulary} and tokens of "
            f"{found.token_bytes} bytes do not fit together"
        )
    return found


def part(content: dict[str, Any], name: str, kind: type[Entry]) -> Entry:
    """A part of an object, of the kind that it must have."""
    if name not in content:
        raise ValueError(f"{name!r} is missing")
    value: Entry = content[name]
    if type(value) is not kind:
        raise ValueError(f"{name!r} must be of the kind {kind.__name__}, got {reprlib.repr(value)}")
    return value


def entry_from(kind: type[Entry], content: object, where: str) -> Entry:
    """A small dataclass of texts and counts from plain values."""
    if not isinstance(content, dict):
        raise ValueError(f"{where} must be an object, got {reprlib.repr(content)}")
    hints = get_type_hints(kind)
    if unknown := content.keys() - hints.keys():
        raise ValueError(f"{where} has the unknown key {min(unknown)!r}")
    try:
        values = {name: part(content, name, hint) for name, hint in hints.items()}
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if negative := [name for name, value in values.items() if isinstance(value, int) and value < 0]:
        raise ValueError(f"{where}: {negative[0]!r} must be at least 0, got {values[negative[0]]}")
    return kind(**values)


def assemble(
    folder: Path,
    kind: str,
    request: dict[str, Any],
    tokenizer: TextTokenizer,
    splits: dict[str, SplitEntry],
    files: dict[str, FileEntry],
    left_out: dict[str, int],
) -> Manifest:
    """The manifest of the files in the folder and the tokenizer beside them."""
    path = folder / "tokenizer.json"
    entry = FileEntry(size=path.stat().st_size, checksums=file_checksums(path))
    return Manifest(
        kind=kind,
        source=request,
        tokenizer=TokenizerEntry(
            name=tokenizer.name,
            file=path.name,
            fingerprint=tokenizer.fingerprint,
            vocabulary=tokenizer.vocabulary,
            end_token=tokenizer.end_token,
            end=tokenizer.end,
        ),
        token_bytes=tokenizer.token_bytes,
        splits=splits,
        files={path.name: entry, **files},
        skipped=left_out,
        versions=versions(),
    )


def versions() -> dict[str, str]:
    """Of the packages that decide the data."""
    names = ("varifocal", "datatrove", "tokenizers", "pyarrow", "numpy")
    return {name: importlib.metadata.version(name) for name in names if importlib.util.find_spec(name)}
