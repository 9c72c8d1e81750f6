"""A document's split follows from its text alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.data.conftest import prepared
from tests.data.texts import made_texts, real_file, write_jsonl
from varifocal.data import SPLITS, PreparedData, Splits
from varifocal.data.splits import splits_from


def members(data: PreparedData) -> dict[str, Counter[str]]:
    """The documents of each split, decoded."""
    tokenizer = data.tokenizer()
    return {
        name: Counter(
            tokenizer.decode(data.split(name).document(number)[:-1]) for number in range(data.split(name).documents)
        )
        for name in SPLITS
    }


def test_split_of_a_text_never_changes() -> None:
    # Fixed values: a change of the hash would move documents of existing data from train to test.
    letters = {"train": "r", "validation": "v", "test": "e"}
    assert (
        "".join(letters[Splits().of(f"文 {number}")] for number in range(40))
        == "rrerrrevrrrrrerrrrrrrrrerrrrrvrrrverrrrr"
    )


def test_text_and_its_bytes_are_the_same_document() -> None:
    assert all(Splits().of(text) == Splits().of(text.encode()) for text in made_texts(50))


def test_shares_are_near_what_was_asked_for() -> None:
    counts = Counter(Splits().of(f"document {number}") for number in range(20_000))
    # Four standard deviations of a binomial share.
    assert counts["train"] / 20_000 == pytest.approx(0.8, abs=4 * (0.16 / 20_000) ** 0.5)
    assert counts["validation"] / 20_000 == pytest.approx(0.1, abs=4 * (0.09 / 20_000) ** 0.5)


def test_order_and_files_do_not_change_a_split(tmp_path: Path, texts: list[str], data: PreparedData) -> None:
    backwards = prepared(write_jsonl(tmp_path / "all.jsonl", [text * 5 for text in reversed(texts)]), tmp_path / "out")
    assert members(backwards) == members(data)
    assert backwards.fingerprint != data.fingerprint


def test_duplicates_never_straddle_splits(tmp_path: Path) -> None:
    texts = made_texts(60, longest=20)
    found = members(prepared(write_jsonl(tmp_path / "a.jsonl", texts + texts[::-1] + texts), tmp_path / "out"))
    assert sum(found.values(), Counter()) == Counter(dict.fromkeys(texts, 3))
    assert all(not set(found[a]) & set(found[b]) for a in SPLITS for b in SPLITS if a != b)


def test_real_fineweb_is_divided_80_10_10_without_overlap(tmp_path: Path) -> None:
    data = prepared(real_file("fineweb_sample10BT_2800docs.parquet"), tmp_path / "out")
    found = {
        name: {data.split(name).document(number).tobytes() for number in range(data.split(name).documents)}
        for name in SPLITS
    }
    total = sum(data.split(name).documents for name in SPLITS)
    assert total == 2800
    for name, share in Splits().as_json().items():
        deviation = (share * (1 - share) / total) ** 0.5
        assert data.split(name).documents / total == pytest.approx(share, abs=4 * deviation), name
    assert all(not found[a] & found[b] for a in SPLITS for b in SPLITS if a != b)


@pytest.mark.parametrize(
    ("text", "wanted"), [("80/10/10", Splits()), ("1/0/0", Splits(1.0, 0.0, 0.0)), ("98/1/1", Splits(0.98, 0.01, 0.01))]
)
def test_shares_can_be_written(text: str, wanted: Splits) -> None:
    assert splits_from(text) == wanted


@pytest.mark.parametrize("text", ["80/20", "a/b/c", "0/0/0", "110/-5/-5", ""])
def test_wrong_shares_are_explained(text: str) -> None:
    with pytest.raises(ValueError, match=r"(three numbers such as 80/10/10|0 or more and sum to 1)"):
        splits_from(text)
