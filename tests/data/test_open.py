"""Whatever is truncated, altered, foreign or missing is told at open, in one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

from tests.data.conftest import prepared
from tests.data.texts import made_texts, write_jsonl
from varifocal.data import DamagedDataError, PreparedData, Splits, dataset, open_data
from varifocal.data.checksums import CHUNK
from varifocal.data.manifest import NAME


@pytest.fixture
def copy(data: PreparedData, tmp_path: Path) -> Path:
    """A copy of the data set, to damage."""
    return Path(shutil.copytree(data.folder, tmp_path / "copy"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def exchange(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def remove(path: Path) -> None:
    path.unlink()


def all_files(data: PreparedData) -> list[str]:
    return list(data.manifest.files)


def test_whole_copy_opens_and_is_the_same(data: PreparedData, copy: Path) -> None:
    opened = open_data(copy, verify="full")
    assert opened.fingerprint == data.fingerprint
    numpy.testing.assert_array_equal(opened.split("test").document(0), data.split("test").document(0))


@pytest.mark.parametrize("damage", [truncate, alter, exchange, remove])
@pytest.mark.parametrize("name", ["train/00000.ds", "test/00001.ds.index", "train/00001.ds.bytes", "tokenizer.json"])
def test_damaged_file_is_named(copy: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(copy / name)
    with pytest.raises(DamagedDataError, match=name) as found:
        open_data(copy)
    assert "\n" not in str(found.value)


def test_files_of_another_data_set_are_foreign(copy: Path, tmp_path: Path) -> None:
    texts = [text * 5 for text in made_texts(600, seed=1)]
    other = prepared(write_jsonl(tmp_path / "other.jsonl", texts), tmp_path / "other")
    shutil.copy(other.folder / "train/00000.ds", copy / "train/00000.ds")
    with pytest.raises(DamagedDataError, match="not of this data set"):
        open_data(copy)


def test_altered_count_in_the_manifest_is_found(copy: Path) -> None:
    content = json.loads((copy / NAME).read_text())
    content["splits"]["train"]["shards"][0]["tokens"] -= 1
    (copy / NAME).write_text(json.dumps(content))
    with pytest.raises(DamagedDataError, match="was altered after it was written"):
        open_data(copy)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "something else"}'])
def test_broken_or_foreign_manifest_is_found(copy: Path, text: str) -> None:
    (copy / NAME).write_text(text)
    with pytest.raises(ValueError, match=NAME):
        open_data(copy)


def test_manifest_of_another_version_is_refused(copy: Path) -> None:
    content = json.loads((copy / NAME).read_text())
    (copy / NAME).write_text(json.dumps(content | {"version": 99}))
    with pytest.raises(ValueError, match="version 99, this program reads version 1"):
        open_data(copy)


def test_folder_without_data_says_how_to_make_some(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="make a data set with 'varifocal data prepare"):
        open_data(tmp_path)


def test_large_data_are_verified_where_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "long.jsonl", ["x" * 2_000_000])
    folder = prepared(source, tmp_path / "long", splits=Splits(1.0, 0.0, 0.0)).folder
    (name,) = (folder / "train").glob("*.ds")
    assert name.stat().st_size > 3 * CHUNK
    content = bytearray(name.read_bytes())
    content[CHUNK + 5] ^= 1
    name.write_bytes(content)
    monkeypatch.setattr(dataset, "AT_ONCE", 0)
    rows = open_data(folder).split("train").rows(length=1000)
    rows.batch([0])
    with pytest.raises(DamagedDataError, match="the checksum of megabyte 1 differs"):
        rows.batch([(CHUNK + 6) // 2 // 1000])
    with pytest.raises(DamagedDataError, match="the checksum of megabyte 1 differs"):
        open_data(folder, verify="full")


def test_tokens_are_those_of_datatrove_files(data: PreparedData) -> None:
    shard = data.manifest.splits["train"].shards[0]
    tokens = numpy.fromfile(data.folder / shard.name, dtype="<u2")
    ends = numpy.fromfile(data.folder / f"{shard.name}.index", dtype="<u8")
    assert (tokens[ends - 1] == 256).all()
    assert len(tokens) == shard.tokens == ends[-1]
    assert (data.folder / f"{shard.name}.metadata").read_text().startswith("bytes|2\n")


def test_unknown_split_is_explained(data: PreparedData) -> None:
    with pytest.raises(ValueError, match="unknown split 'dev'; known are train, validation, test"):
        data.split("dev")


def test_model_with_another_tokenizer_is_refused(data: PreparedData) -> None:
    data.require_tokenizer(data.manifest.tokenizer.fingerprint)
    with pytest.raises(ValueError, match="prepare the data with the same tokenizer"):
        data.require_tokenizer("0" * 64)
