"""How often words occur in the train split, to find the rare ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from varifocal.analysis.token_kinds import WORD
from varifocal.data import PreparedData

PER_MILLION = 10
"""A word that occurs at most this often in a million words is rare."""
MOST_TOKENS = 1_000_000
"""Tokens of the train split that are counted, from its beginning."""


@dataclass(frozen=True)
class WordCounts:
    """How often words occur."""

    counts: Counter[str]
    """By word in lower case, without a possessive 's."""
    words: int

    def is_rare(self, word: str) -> bool:
        """Whether the word occurs at most PER_MILLION times in a million words."""
        return self.counts[word] * 1_000_000 <= PER_MILLION * self.words


def count_words(data: PreparedData, *, most_tokens: int = MOST_TOKENS) -> WordCounts:
    """Count the words in the first documents of the train split."""
    split, tokenizer = data.split("train"), data.tokenizer()
    counts: Counter[str] = Counter()
    tokens = 0
    for number in range(split.documents):
        if tokens >= most_tokens:
            break
        document = split.document(number)[: most_tokens - tokens]
        tokens += len(document)
        text = tokenizer.decode(document).lower().replace("’", "'")
        counts.update(word.removesuffix("'s") for word in WORD.findall(text))
    return WordCounts(counts, counts.total())
