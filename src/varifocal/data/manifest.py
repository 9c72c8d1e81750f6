"""The manifest: what a data set holds, from what it was made, and the checksums by which it is verified."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varifocal.data.checksums import CHUNK, DamagedDataError, file_checksums
from varifocal.data.files import write_durably
from varifocal.data.splits import SPLITS

if TYPE_CHECKING:
    from varifocal.data.tokenizers import TextTokenizer

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
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
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
    return Manifest(
        kind=content["kind"],
        source=content["source"],
        tokenizer=TokenizerEntry(**content["tokenizer"]),
        token_bytes=content["token_bytes"],
        splits={
            name: SplitEntry(shards=tuple(Shard(**shard) for shard in content["splits"][name]["shards"]))
            for name in SPLITS
        },
        files={name: FileEntry(**entry) for name, entry in content["files"].items()},
        skipped=content["skipped"],
        versions=content["versions"],
    )


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
