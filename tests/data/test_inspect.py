"""The report on a data set, against counts made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.conftest import prepared
from tests.data.texts import write_jsonl
from varifocal.data import PreparedData, Splits
from varifocal.data.inspect import inspect_data
from varifocal.report.data_report_plot import plot_data_report
from varifocal.results.data_report import DataReport


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    """Documents of 1, 3, 7, 8 and 100 bytes, each with its end."""
    folder = tmp_path_factory.mktemp("small")
    texts = [letter * size for letter, size in zip("abcde", (1, 3, 7, 8, 100), strict=True)]
    return prepared(write_jsonl(folder / "a.jsonl", texts), folder / "out", splits=Splits(1.0, 0.0, 0.0))


def test_lengths_are_counted(small: PreparedData) -> None:
    split = inspect_data(small, window=8)["splits"]["train"]
    assert (split["documents"], split["tokens"], split["bytes"], split["longest"]) == (5, 124, 119, 101)
    assert split["quantiles"]["0.5"] == 8
    assert [(part["from"], part["to"], part["documents"], part["tokens"]) for part in split["histogram"]] == [
        (2, 3, 1, 2), (4, 7, 1, 4), (8, 15, 2, 17), (16, 31, 0, 0), (32, 63, 0, 0), (64, 127, 1, 101),
    ]  # fmt: skip


def test_what_lies_beyond_the_window_is_counted(small: PreparedData) -> None:
    split = inspect_data(small, window=8)["splits"]["train"]
    assert split["documents_longer_than_window"] == pytest.approx(2 / 5)
    assert split["tokens_beyond_window"] == pytest.approx((1 + 93) / 124)


def test_samples_are_decoded(small: PreparedData) -> None:
    report = inspect_data(small, samples=5)
    assert {sample["text"] for sample in report["samples"]} == {"a", "ccccccc", "bbb", "dddddddd", "e" * 100}
    assert inspect_data(small, samples=0)["samples"] == []


def test_empty_splits_are_left_out(small: PreparedData) -> None:
    assert list(inspect_data(small)["splits"]) == ["train"]


def test_plot_is_drawn(small: PreparedData, tmp_path: Path) -> None:
    for ending in ("png", "svg"):
        plot_data_report(DataReport.from_json(inspect_data(small)), tmp_path / f"lengths.{ending}")
        assert (tmp_path / f"lengths.{ending}").stat().st_size > 1000


def test_wrong_window_is_explained(small: PreparedData) -> None:
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        inspect_data(small, window=0)
