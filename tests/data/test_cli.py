"""`varifocal data` and `varifocal bench data`: what they print, what they write, how they end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data.texts import made_texts, write_jsonl
from tests.test_cli import varifocal
from varifocal.cli.main import run
from varifocal.data import PreparedData, open_data
from varifocal.report.data_bench import reading_table
from varifocal.results.data_bench import DataBench


def test_prepare_prints_the_splits_and_then_has_nothing_to_do(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", made_texts(40))
    arguments = ("data", "prepare", str(source), str(tmp_path / "out"), "--tokenizer", "train:300", "--workers", "1")
    first = varifocal(*arguments)
    assert (first.returncode, first.stderr) == (0, "")
    assert "validation" in first.stdout
    assert "tokenizer train:300, 300 tokens" in first.stdout
    assert "nothing to do" in varifocal(*arguments).stdout
    assert open_data(tmp_path / "out").manifest.tokenizer.vocabulary == 300


def test_inspect_prints_and_writes_its_report(data: PreparedData, tmp_path: Path) -> None:
    file, plot = tmp_path / "report.json", tmp_path / "plot.png"
    result = varifocal("data", "inspect", str(data.folder), "--json", str(file), "--plot", str(plot), "--verify")
    assert (result.returncode, result.stderr) == (0, "")
    assert "length of documents in train" in result.stdout
    assert json.loads(file.read_text())["splits"]["train"]["documents"] == data.split("train").documents
    assert plot.stat().st_size > 1000


def test_probe_is_made_and_opens(tmp_path: Path) -> None:
    result = varifocal(
        "data", "probe", str(tmp_path / "out"), "--texts", "20", "--length", "64", "--distances", "4,40",
        "--questions", "3",
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
    assert "a guess is right 1.6% of the time" in " ".join(result.stdout.split())
    assert open_data(tmp_path / "out").split("train").answers is not None


def test_bench_data_compares_with_a_memmap_slice(data: PreparedData, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    result = varifocal(
        "bench", "data", str(data.folder), "--lengths", "64,256", "--rounds", "1", "--steps", "2", "--json", str(file)
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
    bench = DataBench.read(file)
    assert {row.length for row in bench.rows} == {64, 256}
    assert all(row.tokens_per_second > 0 for row in bench.rows)
    assert reading_table(bench)[1][0] == "numpy memmap slice"


def test_bench_data_makes_its_own_when_none_is_given() -> None:
    result = varifocal("bench", "data", "--tokens", "100000", "--lengths", "128", "--rounds", "1", "--steps", "1")
    assert (result.returncode, result.stderr) == (0, "")
    assert "packed rows" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("data", "prepare", "nowhere", "out"), "there is no source 'nowhere'; give a file"),
        (("data", "prepare", "sotu", "out", "--tokenizer", "train:x"), "such as train:8192; got 'train:x'"),
        (("data", "prepare", "sotu", "out", "--tokenizer", "train:99999999999"), "to 1048576 tokens, got 'train:99999"),
        (
            ("data", "prepare", "sotu", "out", "--tokenizer", f"train:{'9' * 9999}"),
            "to 1048576 tokens, got 'train:99999",
        ),
        (("data", "probe", "out", "--length", str(10**10), "--distances", "8"), "there is not enough memory for this"),
        (("data", "prepare", "sotu", "out", "--splits", "1/2"), "splits are three numbers such as 80/10/10"),
        (("data", "prepare", "sotu", "out", "--invalid", "drop"), "invalid must be 'error' or 'replace', got 'drop'"),
        (("data", "prepare", "sotu", "out", "--executor", "cloud"), "unknown executor 'cloud'; known are local, slurm"),
        (
            ("data", "prepare", "sotu", "out", "--executor-option", "time"),
            "an executor option is written NAME=VALUE, got 'time'",
        ),
        (("data", "inspect", "nowhere"), "nowhere holds no manifest.json"),
        (("data", "probe", "out", "--distances", "a"), "distances must be whole numbers"),
        (("bench", "data", "nowhere"), "nowhere holds no manifest.json"),
    ],
)
def test_mistake_ends_with_one_sentence(
    arguments: tuple[str, ...],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["varifocal", *arguments])
    with pytest.raises(SystemExit) as ended:
        run()
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert sentence in told
    assert told.count("\n") == 1
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"benchmark": "attention"}'])
def test_file_that_is_not_a_result_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match=r"r\.json"):
        DataBench.read(tmp_path / "r.json")
