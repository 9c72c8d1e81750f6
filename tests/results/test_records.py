"""Records: there and back, what is wrong with a file in one sentence, and every committed result as it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from varifocal.results.attention_bench import AttentionBench
from varifocal.results.clients import ClientRuns
from varifocal.results.comparison import ComparisonRecord
from varifocal.results.conformance import read_conformance, write_conformance
from varifocal.results.data_bench import DataBench
from varifocal.results.files import FileRecord, write_whole
from varifocal.results.gpu_check import GpuCheck
from varifocal.results.hf_suite import SuiteRuns
from varifocal.results.metrics import MetricsEntry, read_metrics, validation_curve, write_metrics
from varifocal.results.model_bench import ModelBench
from varifocal.results.plan_check import PlanCheck
from varifocal.results.record import Record, maybe, named
from varifocal.results.retrofit import RetrofitResult, RetrofitRun
from varifocal.results.serving_bench import ServingBench

RESULTS = Path(__file__).parents[2] / "results"
COMMITTED: list[tuple[type[FileRecord], Path]] = [
    (kind, path)
    for kind, pattern in (
        (ComparisonRecord, "*/comparison.json"),
        (AttentionBench, "attention_bench.json"),
        (ModelBench, "model_bench_*.json"),
        (DataBench, "data_bench.json"),
        (PlanCheck, "plan_check.json"),
        (RetrofitResult, "retrofit_*.json"),
        (ClientRuns, "clients.json"),
        (SuiteRuns, "hf_suite.json"),
        (ServingBench, "serving*.json"),
        (GpuCheck, "gpu_check.json"),
    )
    for path in sorted(RESULTS.glob(pattern))
]


@dataclass(frozen=True, kw_only=True)
class Part(Record):
    kind: str = named("pass")
    value: float
    note: str | None = maybe()


@dataclass(frozen=True, kw_only=True)
class Sample(FileRecord):
    tag: ClassVar[tuple[str, str]] = ("experiment", "sample")
    what: ClassVar[str] = "a result of 'varifocal sample'"
    remedy: ClassVar[str] = "make one with its --json option"

    count: int
    names: tuple[str, ...]
    pair: tuple[int, float]
    parts: dict[str, Part] = field(default_factory=dict)
    mechanism: str | tuple[str, ...] = "dense"
    mode: Literal["slow", "fast"] = "slow"
    nothing: int | None = None
    flag: bool = False
    anything: Any = None


SAMPLE = Sample(count=2, names=("a", "b"), pair=(1, 0.5), parts={"x": Part(kind="forward", value=1)})
PLAIN = {
    "experiment": "sample", "count": 2, "names": ["a", "b"], "pair": [1, 0.5],
    "parts": {"x": {"pass": "forward", "value": 1}}, "mechanism": "dense", "mode": "slow", "nothing": None,
    "flag": False, "anything": None,
}  # fmt: skip


def test_record_is_written_with_its_tag_and_without_what_is_left_out() -> None:
    assert SAMPLE.to_json() == PLAIN
    assert list(SAMPLE.to_json()) == list(PLAIN)


def test_record_reads_as_it_was_written(tmp_path: Path) -> None:
    SAMPLE.write(tmp_path / "sample.json")
    assert Sample.read(tmp_path / "sample.json") == SAMPLE
    assert [file.name for file in tmp_path.iterdir()] == ["sample.json"]


def test_file_of_an_older_version_takes_the_defaults() -> None:
    assert Sample.from_json({"count": 2, "names": [], "pair": [1, 2]}).mechanism == "dense"


def test_what_a_newer_version_wrote_is_kept() -> None:
    newer = PLAIN | {"colour": "red", "parts": {"x": {"pass": "forward", "value": 1, "weight": 2}}}
    assert Sample.from_json(newer).to_json() == newer


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"count": "two"}, "count must be a whole number, got 'two'"),
        ({"count": 2.0}, r"count must be a whole number, got 2\.0"),
        ({"count": True}, "count must be a whole number, got True"),
        ({"count": None}, "count must be a whole number, got None"),
        ({"names": "ab"}, "names must be a list, got 'ab'"),
        ({"names": ["a", 3]}, r"names\[1\] must be a text, got 3"),
        ({"pair": [1]}, r"pair must be a list of 2, got \[1\]"),
        ({"parts": []}, r"parts must be an object, got \[\]"),
        ({"parts": {"x": {"value": 1}}}, r"parts\.x\.pass is missing"),
        ({"parts": {"x": {"pass": "forward", "value": []}}}, r"parts\.x\.value must be a number, got \[\]"),
        ({"mechanism": 3}, "mechanism must be a text or a list, got 3"),
        ({"mode": "middling"}, "mode must be 'slow' or 'fast', got 'middling'"),
        ({"nothing": "x"}, "nothing must be a whole number, got 'x'"),
        ({"flag": 0}, "flag must be true or false, got 0"),
    ],
)
def test_part_of_another_kind_is_named(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    file = tmp_path / "sample.json"
    file.write_text(json.dumps(PLAIN | change))
    with pytest.raises(ValueError, match=rf"sample\.json .*parts are missing or have another type: {sentence}$"):
        Sample.read(file)


def test_missing_part_is_named() -> None:
    with pytest.raises(ValueError, match=r"^pair is missing$"):
        Sample.from_json({"count": 1, "names": []})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "cannot read .*: Expecting value"),
        ('{"experiment": "sample", "count"', "cannot read .*: Expecting ':' delimiter"),
        ("[" * 100_000, "cannot read .*: it is nested too deeply"),
        ("[]", "is not a result of 'varifocal sample'; make one with its --json option"),
        ("{}", "is not a result of 'varifocal sample'; make one with its --json option"),
        ('{"experiment": "other"}', "is not a result of 'varifocal sample'"),
        ('{"experiment": "sample"}', "parts are missing or have another type: count is missing"),
    ],
)
def test_file_that_is_something_else_is_refused_in_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "sample.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=sentence) as raised:
        Sample.read(file)
    assert "\n" not in str(raised.value)


def test_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*: No such file or directory"):
        Sample.read(tmp_path / "sample.json")
    (tmp_path / "sample.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"cannot read .*: 'utf-8' codec"):
        Sample.read(tmp_path / "sample.json")


def test_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "sample.json"
    SAMPLE.write(file)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(file, "half")
    assert Sample.read(file) == SAMPLE
    assert [one.name for one in tmp_path.iterdir()] == ["sample.json"]


@pytest.mark.parametrize(("kind", "path"), COMMITTED, ids=lambda value: getattr(value, "name", None))
def test_committed_result_reads_and_would_be_written_as_it_is(kind: type[FileRecord], path: Path) -> None:
    assert kind.read(path).to_json() == json.loads(path.read_text(encoding="utf-8"))


def test_committed_conformance_reads_and_would_be_written_as_it_is(tmp_path: Path) -> None:
    write_conformance(tmp_path / "c.json", read_conformance(RESULTS / "conformance.json"))
    assert (tmp_path / "c.json").read_text() == (RESULTS / "conformance.json").read_text()


@pytest.mark.parametrize("text", ["{}", "[3]", '[{"name": "dense"}]'])
def test_other_conformance_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ValueError, match=r"c\.json .*a result of 'varifocal check'"):
        read_conformance(tmp_path / "c.json")


def metrics_file(path: Path, end: str = "") -> Path:
    entries = [
        MetricsEntry(step=1, tokens=64, loss=2.0),
        MetricsEntry(step=1, tokens=64, validation_loss=1.9),
        MetricsEntry(step=1, tokens=64, validation_loss=1.8),
        MetricsEntry(step=2, tokens=128, loss=1.5),
    ]
    write_metrics(path, entries)
    with path.open("a") as file:
        file.write(end)
    return path


def test_half_a_line_of_metrics_is_left_out(tmp_path: Path) -> None:
    entries = read_metrics(metrics_file(tmp_path / "metrics.jsonl", '{"step": 3, "lo'))
    assert [entry.step for entry in entries] == [1, 1, 1, 2]
    assert validation_curve(entries) == ((64, 1.8),)


def test_line_of_metrics_that_is_something_else_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"metrics\.jsonl .*: line 5\.step must be a whole number, got 'x'"):
        read_metrics(metrics_file(tmp_path / "metrics.jsonl", '{"step": "x"}\n'))


def test_run_of_the_same_mechanism_and_options_is_replaced() -> None:
    make: Callable[..., RetrofitRun] = RetrofitRun
    first, other = make(mechanism="local", asked={}, share=0), make(mechanism="local", asked={"window": 8}, share=0)
    again = make(mechanism="local", asked={}, share=0, loss_after=1.0)
    assert RetrofitResult(runs=(first, other)).with_run(again).runs == (other, again)
