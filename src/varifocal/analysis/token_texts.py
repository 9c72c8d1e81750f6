"""Where the tokens of a document are in its text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from varifocal.data.tokenizers import TextTokenizer

Places = NDArray[numpy.int64]


@dataclass(frozen=True, eq=False)
class PlacedTokens:
    """A text and its tokens: token t is text[begins[t]:ends[t]]."""

    text: str
    begins: Places
    ends: Places

    def part(self, first: int, last: int) -> PlacedTokens:
        """The tokens from `first` up to, but not including, `last`, and the text that they cover."""
        if first >= last:
            return PlacedTokens("", self.begins[:0], self.ends[:0])
        begin, end = int(self.begins[first]), int(self.ends[last - 1])
        return PlacedTokens(self.text[begin:end], self.begins[first:last] - begin, self.ends[first:last] - begin)


def place_tokens(tokenizer: TextTokenizer, tokens: NDArray[numpy.int64]) -> PlacedTokens:
    """The text of a document and the places of its tokens, found by tokenizing the text again.

    That may give other tokens, if decoding loses something such as half a letter at the end of a text; then the tokens
    are decoded one by one.
    """
    text = tokenizer.decode(tokens)
    ids: list[int] = []
    places: list[tuple[int, int]] = []
    before = 0
    for part in tokenizer.parts(text):
        encoding = tokenizer.raw.encode(part, add_special_tokens=False)
        ids += encoding.ids
        places += [(before + begin, before + end) for begin, end in encoding.offsets]
        before += len(part)
    if ids != tokens.tolist():
        return pieces(tokenizer, tokens)
    whole = numpy.array(places, dtype=numpy.int64).reshape(-1, 2)
    return PlacedTokens(text, whole[:, 0], whole[:, 1])


def pieces(tokenizer: TextTokenizer, tokens: NDArray[numpy.int64]) -> PlacedTokens:
    """The tokens decoded one by one, and their texts joined."""
    texts = [tokenizer.decode([token]) for token in tokens.tolist()]
    lengths = numpy.array([len(text) for text in texts], dtype=numpy.int64)
    ends = numpy.cumsum(lengths)
    return PlacedTokens("".join(texts), ends - lengths, ends)
