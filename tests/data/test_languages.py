"""Text in more than one byte a letter: what is counted, and bits per byte."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.data.conftest import prepared
from tests.data.texts import write_jsonl
from varifocal.data import SPLITS, Splits

ALL = Splits(1.0, 0.0, 0.0)
CHINESE = ["床前明月光，疑是地上霜。", "举头望明月，低头思故乡。", "白日依山尽，黄河入海流。"] * 20
MIXED = [f"{line} and the moon {number}, о луне" for number, line in enumerate(CHINESE)]


@pytest.mark.parametrize("texts", [CHINESE, MIXED], ids=["chinese", "mixed"])
@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2", "train:400"])
def test_whole_path_works_in_any_script(tmp_path: Path, texts: list[str], tokenizer: str) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    data = prepared(source, tmp_path / "out", tokenizer=tokenizer, splits=ALL)
    split, words = data.split("train"), data.tokenizer()
    assert [words.decode(split.document(number)[:-1]) for number in range(split.documents)] == texts
    assert split.bytes == sum(len(text.encode("utf-8")) for text in texts)


def test_bits_per_byte_of_a_uniform_guess_over_bytes(tmp_path: Path) -> None:
    # Every one of 257 tokens the same chance: log2(257) bits a token; one token a byte, and an end.
    split = prepared(write_jsonl(tmp_path / "a.jsonl", ["明月"]), tmp_path / "out", splits=ALL).split("train")
    assert split.tokens == 7
    assert split.bits_per_byte(math.log(257)) == pytest.approx(math.log2(257) * 7 / 6)


def test_bits_per_byte_do_not_depend_on_the_tokenizer(tmp_path: Path) -> None:
    # The same probability for the same text is the same number of bits, in however many tokens it is told.
    source = write_jsonl(tmp_path / "a.jsonl", MIXED)
    nats, found = 1000.0, []
    for name in ("bytes", "gpt2"):
        split = prepared(source, tmp_path / name, tokenizer=name, splits=ALL).split("train")
        found.append(split.bits_per_byte(nats / split.tokens))
    assert found[0] == pytest.approx(found[1])
    assert found[0] == pytest.approx(nats / math.log(2) / sum(len(text.encode()) for text in MIXED))


def test_same_character_in_another_form_is_another_document(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["é", "e\u0301"])
    data = prepared(source, tmp_path / "out")
    assert sum(data.split(name).bytes for name in SPLITS) == 2 + 3


def test_empty_split_has_no_bits_per_byte(tmp_path: Path) -> None:
    data = prepared(write_jsonl(tmp_path / "a.jsonl", ["a"]), tmp_path / "out", splits=ALL)
    with pytest.raises(ValueError, match="the split 'test' is empty"):
        data.split("test").bits_per_byte(1.0)
