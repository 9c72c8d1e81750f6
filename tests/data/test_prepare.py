"""Documents to a data set: what it holds, that it does not depend on workers, and what bad input does."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from tests.data.conftest import prepared
from tests.data.texts import made_texts, real_file, write_jsonl
from varifocal.data import SPLITS, PreparedData, Splits, open_data
from varifocal.data.files import explained
from varifocal.data.prepare import Options, Progress, prepare


def run_prepare(*arguments: str, limit: int | None = None, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own; no file may grow beyond `limit` bytes."""

    def restrict() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    program = "from varifocal.cli.main import run; run()"
    return subprocess.run(
        [sys.executable, "-c", program, "data", "prepare", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        preexec_fn=restrict,
    )


def test_every_document_is_there_with_its_bytes(data: PreparedData, texts: list[str]) -> None:
    tokenizer = data.tokenizer()
    found = {}
    for name in SPLITS:
        split = data.split(name)
        for number in range(split.documents):
            text = tokenizer.decode(split.document(number)[:-1])
            found[text] = name
            assert split.document_bytes(number) == len(text.encode())
        assert split.bytes == sum(split.document_bytes(number) for number in range(split.documents))
    assert found == {text * 5: Splits().of(text * 5) for text in texts}


def test_every_document_ends_with_the_end_and_nothing_else_is_one(data: PreparedData) -> None:
    for name in SPLITS:
        split = data.split(name)
        whole = numpy.concatenate([split.document(number) for number in range(split.documents)])
        ends = numpy.cumsum([len(split.document(number)) for number in range(split.documents)]) - 1
        numpy.testing.assert_array_equal(numpy.flatnonzero(whole == split.end), ends)


def test_workers_do_not_change_the_data(tmp_path: Path) -> None:
    for number in range(4):
        texts = [text * 40 for text in made_texts(80, seed=number)]
        write_jsonl(tmp_path / f"{number}.jsonl", texts)
    options = Options(tokenizer="bytes")
    several = prepare(str(tmp_path), tmp_path / "several", options=options, workers=2)
    alone = prepare(str(tmp_path), tmp_path / "alone", options=options, workers=1)
    assert several.pieces > 2
    assert several.data is not None
    assert alone.data is not None
    assert several.data.fingerprint == alone.data.fingerprint


def test_second_run_does_nothing(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", made_texts(30))
    first = prepared(source, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    again = prepare(os.path.relpath(source), tmp_path / "out", options=Options(tokenizer="bytes"))
    assert again.outcome == "nothing to do"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before
    assert again.data is not None
    assert again.data.fingerprint == first.fingerprint


def test_nothing_but_the_data_set_remains(data: PreparedData) -> None:
    found = {path.relative_to(data.folder).as_posix() for path in data.folder.rglob("*") if path.is_file()}
    assert found == {"manifest.json", *data.manifest.files}


@pytest.mark.parametrize("change", ["tokenizer", "splits", "source"])
def test_other_request_for_the_same_folder_is_refused(tmp_path: Path, change: str) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", made_texts(30))
    prepared(source, tmp_path / "out")
    before = (tmp_path / "out" / "manifest.json").read_bytes()
    options: dict[str, object] = {}
    if change == "tokenizer":
        options = {"tokenizer": "gpt2"}
    if change == "splits":
        options = {"splits": Splits(0.5, 0.25, 0.25)}
    if change == "source":
        write_jsonl(source, made_texts(30, seed=1))
    with pytest.raises(ValueError, match="already holds data prepared from"):
        prepared(source, tmp_path / "out", **options)
    assert (tmp_path / "out" / "manifest.json").read_bytes() == before


def test_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="is not empty and holds no data set"):
        prepared(write_jsonl(tmp_path / "a.jsonl", ["a"]), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


def test_tokenizer_is_trained_on_the_train_split_only(tmp_path: Path) -> None:
    texts = made_texts(200, longest=20)
    words = {"train": "aardvark", "validation": "zyzzyva", "test": "quokka"}
    marked = []
    for text in texts:
        candidates = (f"{text} {word * 3} {tail}" for tail in range(100) for word in words.values())
        marked.append(next(t for t in candidates if words[Splits().of(t)] * 3 in t))
    data = prepared(write_jsonl(tmp_path / "a.jsonl", marked), tmp_path / "out", tokenizer="train:600")
    vocabulary = data.tokenizer().raw.get_vocab()
    assert any("aardvark" in token for token in vocabulary)
    assert not any("zyz" in token or "quok" in token for token in vocabulary)


def test_progress_counts_documents_and_tokens(tmp_path: Path) -> None:
    seen: list[Progress] = []
    source = write_jsonl(tmp_path / "a.jsonl", made_texts(50))
    done = prepare(
        str(source), tmp_path / "out", options=Options(tokenizer="bytes"), workers=1, on_progress=seen.append
    )
    assert done.data is not None
    last = [progress for progress in seen if progress.doing == "tokenizing"][-1]
    assert last.documents == 50
    assert last.tokens == sum(done.data.split(name).tokens for name in SPLITS)
    assert last.pieces_done == last.pieces == 1


def test_document_of_50_megabytes_is_one_document(tmp_path: Path) -> None:
    line = "the bees 中文 of the old mill kept to the river\n"
    (tmp_path / "long.txt").write_text(line * (50_000_000 // len(line.encode())))
    size = (tmp_path / "long.txt").stat().st_size
    data = prepared(tmp_path / "long.txt", tmp_path / "out", splits=Splits(1.0, 0.0, 0.0))
    split = data.split("train")
    assert (split.documents, split.tokens, split.bytes) == (1, size + 1, size)


def test_ten_documents_are_enough(tmp_path: Path) -> None:
    data = prepared(write_jsonl(tmp_path / "a.jsonl", made_texts(10)), tmp_path / "out", tokenizer="train:300")
    assert sum(data.split(name).documents for name in SPLITS) == 10
    assert data.split("train").rows(length=16)[0].positions.tolist()[:2] == [0, 1]


def test_manifest_tells_where_the_data_come_from(data: PreparedData) -> None:
    content = json.loads((data.folder / "manifest.json").read_text())
    assert [file["path"] for file in content["source"]["source"]["files"]] == ["0.jsonl", "1.jsonl", "2.jsonl"]
    assert content["fingerprint"] == data.fingerprint
    assert content["splits"]["train"]["tokens"] == data.split("train").tokens
    assert {"varifocal", "datatrove", "tokenizers"} <= set(content["versions"])


def test_same_data_prepared_elsewhere_have_the_same_fingerprint(tmp_path: Path, data: PreparedData) -> None:
    source = data.folder.parent
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for path in source.glob("*.jsonl"):
        shutil.copy(path, moved)
    assert prepared(moved, tmp_path / "out").fingerprint == data.fingerprint


def test_full_disk_is_explained_and_work_goes_on_afterwards(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [text * 20 for text in made_texts(300)])
    arguments = (str(source), str(tmp_path / "out"), "--tokenizer", "bytes")
    result = run_prepare(*arguments, "--workers", "1", limit=1_000_000)
    assert result.returncode == 2, result.stderr
    assert "cannot write to" in result.stderr
    assert "make room and run the same command again" in result.stderr
    assert result.stderr.count("\n") == 1
    with pytest.raises(ValueError, match="was not finished; run the same"):
        open_data(tmp_path / "out")
    assert run_prepare(*arguments).returncode == 0
    assert open_data(tmp_path / "out").fingerprint == prepared(source, tmp_path / "other").fingerprint


def test_folder_that_may_not_be_written_is_explained(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["a"])
    if os.getuid() == 0:
        # Nothing is forbidden to root but what the system itself does not allow.
        out = Path("/sys/varifocal")
    else:
        (tmp_path / "locked").mkdir(mode=0o555)
        out = tmp_path / "locked" / "out"
    with pytest.raises(ValueError, match=r"cannot write to .*; choose a folder that you may write"):
        prepared(source, out)


def test_file_in_the_place_of_the_folder_is_explained(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["a"])
    with pytest.raises(ValueError, match="is a file; name a folder"):
        prepared(source, source)
    with pytest.raises(ValueError, match="cannot write to"):
        prepared(source, source / "below")


def test_other_errors_of_the_system_are_not_disguised(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError), explained(tmp_path):
        tmp_path.read_text()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"invalid": "ignore"}, "invalid must be 'error' or 'replace'"),
        ({"separator": ""}, "the separator of documents must not be empty"),
    ],
)
def test_impossible_options_are_explained(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Options(**options)  # type: ignore[arg-type]


def test_embedded_corpus_becomes_a_data_set(tmp_path: Path) -> None:
    data = prepared("sotu", tmp_path / "out")
    assert sum(data.split(name).documents for name in SPLITS) == 249
    assert sum(data.split(name).bytes for name in SPLITS) > 12_000_000


def test_real_chinese_is_prepared_with_its_bytes(tmp_path: Path) -> None:
    from pyarrow import parquet

    path = real_file("chinese_classic_novels.parquet")
    texts = parquet.read_table(path, columns=["text"])["text"].to_pylist()[:3]
    data = prepared(write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "out", tokenizer="train:1000")
    assert sum(data.split(name).bytes for name in SPLITS) == sum(len(text.encode()) for text in texts)
    tokenizer, split = data.tokenizer(), data.split("train")
    assert {tokenizer.decode(split.document(n)[:-1]) for n in range(split.documents)} <= set(texts)
