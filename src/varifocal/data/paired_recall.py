"""Multi-query associative recall in the field's form (Zoology, arXiv:2312.04927): all facts first, then the questions.

A text begins with its facts, key and value in turn; the rest is noise from the whole vocabulary, into which every key
is put once more, with its value after it. Most questions come soon after the facts, the others ever more rarely: place
p has a probability like p^(a - 1). The published texts have noise where ours have the value after a question's key; as
every key is asked for once, that tells no other answer.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy
from numpy.typing import NDArray

from varifocal.data.arrays import SplitArrays, write_arrays
from varifocal.data.dataset import PreparedData, open_data
from varifocal.data.probe import UNKNOWN, word_tokenizer
from varifocal.data.splits import SPLITS, Splits
from varifocal.data.tokenizers import END

FIRST_KEY = 2
"""After the end of a text and the unknown word."""


@dataclass(frozen=True, kw_only=True)
class PairedRecall:
    """What the texts are like."""

    length: int = 256
    """Tokens of a text, its end included: read it in rows of this length."""
    pairs: tuple[int, ...] = (4, 8, 16, 32)
    """Facts of a text, and questions about them; each text draws one of these numbers."""
    vocabulary: int = 8192
    """All tokens: half of them are keys, half are values, and any of them is noise."""
    power: float = 0.01
    """a of the power law."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.pairs or min(self.pairs) < 1:
            raise ValueError(f"pairs must be numbers of at least 1, got {list(self.pairs)}")
        if 4 * max(self.pairs) >= self.length:
            raise ValueError(
                f"{max(self.pairs)} facts and their questions do not fit into a text of {self.length} tokens; ask at "
                f"most {(self.length - 1) // 4}, or make it longer"
            )
        if self.values <= max(self.pairs):
            raise ValueError(
                f"a vocabulary of {self.vocabulary} has {self.values} keys, too few for {max(self.pairs)} facts"
            )
        if not self.power > 0 or self.seed < 0:
            raise ValueError(f"power must be above 0 and the seed at least 0, got {self.power} and {self.seed}")

    @property
    def values(self) -> int:
        """Kinds of value, and of key."""
        return (self.vocabulary - FIRST_KEY) // 2

    @property
    def first_value(self) -> int:
        return FIRST_KEY + self.values

    @property
    def words(self) -> list[str]:
        """The vocabulary, in the order of the tokens; a last word is noise alone if keys and values leave one over."""
        named = [f"{letter}{number}" for letter in "kv" for number in range(self.values)]
        return [END, UNKNOWN, *named, *["n0"][: self.vocabulary - FIRST_KEY - 2 * self.values]]


def make_paired_recall(
    out: str | Path, wanted: PairedRecall, *, texts: int = 20_000, splits: Splits | None = None
) -> PreparedData:
    """Write a data set of `texts` texts, divided in the shares of `splits`, and open it: a probe like any other."""
    shares = (splits or Splits()).as_json()
    if texts < 1:
        raise ValueError(f"a probe needs at least 1 text, got {texts}")
    counts = {name: round(texts * share) for name, share in shares.items()}
    arrays = {
        name: split_arrays(wanted, counts[name], stream=number) for number, name in enumerate(SPLITS) if counts[name]
    }
    known = asdict(wanted) | {"pairs": list(wanted.pairs), "values": wanted.values}
    source = {"kind": "probe", "form": "pairs first", **known, "texts": texts, "splits": shares}
    write_arrays(Path(out), arrays, kind="probe", source=source, tokenizer=word_tokenizer(wanted.words))
    return open_data(out)


def split_arrays(wanted: PairedRecall, count: int, *, stream: int) -> SplitArrays:
    """`count` texts; every seed and stream has its own."""
    generator = numpy.random.default_rng([wanted.seed, stream])
    words = wanted.words
    tokens = generator.integers(FIRST_KEY, len(words), (count, wanted.length))
    answers: list[NDArray[numpy.int64]] = []
    for text in range(count):
        pairs = int(generator.choice(wanted.pairs))
        places = write_text(wanted, tokens[text], pairs, generator)
        places[:, 0] += text * wanted.length
        answers.append(places)
    tokens[:, -1] = 0
    widths = numpy.array([len(word) for word in words])
    return SplitArrays(
        tokens=tokens.reshape(-1),
        ends=numpy.arange(1, count + 1) * wanted.length,
        byte_ends=numpy.cumsum(widths[tokens[:, :-1]].sum(axis=1) + wanted.length - 2),
        answers=numpy.concatenate(answers),
    )


def write_text(
    wanted: PairedRecall, text: NDArray[numpy.int64], pairs: int, generator: numpy.random.Generator
) -> NDArray[numpy.int64]:
    """Write facts and questions into a text [L]; [P, 2] where the answers stand and how far back their facts are."""
    keys = generator.choice(wanted.values, pairs, replace=False) + FIRST_KEY
    values = generator.choice(wanted.values, pairs, replace=False) + wanted.first_value
    facts = 2 * numpy.arange(pairs)
    text[facts], text[facts + 1] = keys, values
    # Places in steps of two tokens after the facts; the last token is the end of the text.
    space = (wanted.length - 1 - 2 * pairs) // 2
    chance = numpy.arange(1, space + 1, dtype=numpy.float64) ** (wanted.power - 1)
    questions = 2 * pairs + 2 * generator.choice(space, pairs, replace=False, p=chance / chance.sum())
    text[questions], text[questions + 1] = keys, values
    order = numpy.argsort(questions)
    return numpy.stack([questions[order] + 1, questions[order] - facts[order]], axis=1).astype(numpy.int64)
