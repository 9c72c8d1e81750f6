"""Multi-query associative recall (Zoology, arXiv:2312.04927), with facts and questions at set distances.

A text is noise with facts in it, a key and its value, and later questions: the key again, after which its value is to
be told. A question at distance d can only be answered by what reads d tokens back; attention to a window cannot, in l
layers, once d exceeds l windows.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from varifocal.data.arrays import SplitArrays, write_arrays
from varifocal.data.dataset import PreparedData, open_data
from varifocal.data.splits import SPLITS, Splits
from varifocal.data.tokenizers import END, TextTokenizer

UNKNOWN = "<|unknown|>"
ATTEMPTS = 1000


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What the texts are like."""

    length: int = 1024
    """Tokens of a text, its end included: read it in rows of this length."""
    questions: int = 8
    """Facts in a text, and questions about them, one each."""
    distances: tuple[int, ...] = (8, 64, 512)
    """From a question back to the key of its fact; each question draws one."""
    keys: int = 64
    values: int = 64
    """Kinds of value: a guess is right once in so many."""
    noise: int = 128
    """Kinds of token that mean nothing."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.distances or min(self.distances) < 2 or max(self.distances) > self.length - 3:
            raise ValueError(
                f"distances must be between 2 and length - 3 = {self.length - 3}, so that fact, question and end have "
                f"room; got {self.distances}"
            )
        if not 1 <= self.questions <= self.keys:
            raise ValueError(f"questions must be at least 1 and at most the {self.keys} keys, got {self.questions}")
        if 8 * self.questions > self.length:
            raise ValueError(
                f"{self.questions} facts and questions crowd a text of {self.length} tokens; ask at most "
                f"{self.length // 8}, or make it longer"
            )
        if self.values < 2 or self.noise < 1 or self.seed < 0:
            raise ValueError(
                f"a probe needs at least 2 values, at least 1 kind of noise and a seed of at least 0, got "
                f"{self.values}, {self.noise} and {self.seed}"
            )

    @property
    def words(self) -> list[str]:
        """The vocabulary, in the order of the tokens."""
        kinds = (("k", self.keys), ("v", self.values), ("n", self.noise))
        return [END, UNKNOWN, *(f"{letter}{number}" for letter, count in kinds for number in range(count))]

    @property
    def first_key(self) -> int:
        return 2

    @property
    def first_value(self) -> int:
        return 2 + self.keys

    @property
    def first_noise(self) -> int:
        return 2 + self.keys + self.values


def make_probe(out: str | Path, probe: Probe, *, texts: int = 20_000, splits: Splits | None = None) -> PreparedData:
    """Write a data set of `texts` texts, divided in the shares of `splits`, and open it.

    It opens like any other. `TokenSplit.answers` and `PackedRows.answers` tell where the answers stand and how far
    back their facts are.
    """
    shares = (splits or Splits()).as_json()
    if texts < 1:
        raise ValueError(f"a probe needs at least 1 text, got {texts}")
    counts = {name: round(texts * share) for name, share in shares.items()}
    arrays = {
        name: split_arrays(probe, counts[name], stream=number) for number, name in enumerate(SPLITS) if counts[name]
    }
    source = {"kind": "probe", **asdict(probe), "distances": list(probe.distances), "texts": texts, "splits": shares}
    write_arrays(Path(out), arrays, kind="probe", source=source, tokenizer=probe_tokenizer(probe))
    return open_data(out)


def probe_tokenizer(probe: Probe) -> TextTokenizer:
    """One token for each word: k0, v0, n0, ..."""
    return word_tokenizer(probe.words)


def word_tokenizer(words: list[str]) -> TextTokenizer:
    """One token for each word, in their order."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    raw = Tokenizer(models.WordLevel(vocab={word: number for number, word in enumerate(words)}, unk_token=UNKNOWN))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.add_special_tokens([AddedToken(END, special=True)])
    raw.encode_special_tokens = True
    return TextTokenizer("probe", raw, END)


def split_arrays(probe: Probe, count: int, *, stream: int) -> SplitArrays:
    """`count` texts; every seed and stream has its own."""
    generator = numpy.random.default_rng([probe.seed, stream])
    places = random.Random(f"{probe.seed} {stream}")
    tokens = generator.integers(0, probe.noise, (count, probe.length)) + probe.first_noise
    answers = numpy.empty((count, probe.questions, 2), dtype=numpy.int64)
    for text in range(count):
        keys = generator.permutation(probe.keys)[: probe.questions] + probe.first_key
        values = generator.integers(0, probe.values, probe.questions) + probe.first_value
        answers[text] = place_facts(probe, tokens[text], keys, values, places)
        answers[text, :, 0] += text * probe.length
    tokens[:, -1] = 0
    widths = numpy.array([len(word) for word in probe.words])
    sizes = widths[tokens[:, :-1]].sum(axis=1) + probe.length - 2
    return SplitArrays(
        tokens=tokens.reshape(-1),
        ends=numpy.arange(1, count + 1) * probe.length,
        byte_ends=numpy.cumsum(sizes),
        answers=answers.reshape(-1, 2),
    )


def place_facts(
    probe: Probe,
    text: NDArray[Any],
    keys: NDArray[Any],
    values: NDArray[Any],
    places: random.Random,
) -> list[tuple[int, int]]:
    """Write facts and questions into a text [L]; where the answers stand and their distances, ascending."""
    taken: set[int] = set()
    answers: list[tuple[int, int]] = []
    # The far ones first: they have the fewest places.
    distances = sorted((places.choice(probe.distances) for _ in keys), reverse=True)
    for key, value, distance in zip(keys.tolist(), values.tolist(), distances, strict=True):
        for _ in range(ATTEMPTS):
            fact = places.randrange(probe.length - 2 - distance)
            question = fact + distance
            wanted = {fact, fact + 1, question, question + 1}
            if not wanted & taken:
                break
        else:
            raise ValueError(
                f"found no room for {probe.questions} questions at distances {probe.distances} in {probe.length} "
                "tokens; ask fewer or make the text longer"
            )
        taken |= wanted
        text[[fact, fact + 1, question, question + 1]] = key, value, key, value
        answers.append((question + 1, distance))
    return sorted(answers)
