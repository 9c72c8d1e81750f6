"""The kinds of the tokens of a text; a token may have several kinds."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from varifocal.analysis.function_words import is_function_word

Flags = NDArray[numpy.bool_]


@dataclass(frozen=True)
class Kind:
    """A kind of token."""

    name: str
    definition: str
    among: str | None = None
    """The kind of the tokens that it is compared with; None for all tokens."""


KINDS = (
    Kind("function word", "a word of a closed list of English articles, pronouns, prepositions, auxiliaries"),
    Kind("content word", "any other word of Latin letters"),
    Kind("rare word", "a content word of at most 10 in a million words of the train split", "content word"),
    Kind("number", "begins with a digit"),
    Kind("punctuation", "begins with a punctuation mark or symbol"),
    Kind("first mention", "a content word that the visible text has not had before", "content word"),
    Kind("repeated mention", "a content word that stands in the visible text already", "content word"),
    Kind("quotation", "between quotation marks of one paragraph"),
    Kind("start of document", "among the first 32 tokens of its document"),
    Kind("code", "on a line that looks like a program, or in a fenced block"),
    Kind("other script", "a word with letters that are not Latin"),
)
"""All kinds, in the order of the tables."""

START = 32
"""Tokens of a document that count as its start."""
WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
NUMBER = re.compile(r"\d+(?:[.,:/]\d+)*")
QUOTATION = re.compile(r'“[^”\n]+”|"[^"\n]+"|«[^»\n]+»|„[^“\n]+“|「[^」\n]+」')
FENCE = re.compile(r"^```.*?^```", flags=re.MULTILINE | re.DOTALL)
SIGNS_OF_CODE = (
    re.compile(r"[;{}]\s*$"),
    re.compile(r"\w\([^()]*\)|\(\)"),
    re.compile(r"[=!<>]=|[-=]>|::|&&|\|\||\+\+|\+="),
    re.compile(r"\w_\w|[a-z][A-Z]\w*\(|\w\.\w+\("),
    re.compile(r"^\s*(?:def|class|import|from|return|function|var|let|const|if|for|while|#include|public|private)\b.*[:;({]"),
    re.compile(r"^\s*(?:\w+\s*=\s*\S|</?\w+)"),
)  # fmt: skip
"""A line with two of these signs counts as code."""


def token_kinds(
    text: str,
    begins: NDArray[numpy.int64],
    ends: NDArray[numpy.int64],
    *,
    is_rare: Callable[[str], bool],
    document_place: int,
) -> Flags:
    """Flags [K, T] for the tokens text[begin:end] of a part of a document; the first letter of a token decides.

    Args:
        text: the part of the document that the model sees; mentions are counted in it.
        begins: [T], where tokens begin in the text.
        ends: [T], where they end.
        is_rare: whether a content word, in lower case, is rare.
        document_place: how many tokens of the document come before this part.
    """
    letters = letter_kinds(text, is_rare)
    flags = numpy.zeros((len(KINDS), len(begins)), dtype=bool)
    for token, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        while begin < end and text[begin].isspace():
            begin += 1
        if begin < end:
            flags[:, token] = letters[:, begin]
    flags[index_of("start of document"), : max(0, START - document_place)] = True
    return flags


def letter_kinds(text: str, is_rare: Callable[[str], bool]) -> Flags:
    """Flags [K, letters] for every letter of a text."""
    flags = numpy.zeros((len(KINDS), len(text)), dtype=bool)

    def mark(name: str, begin: int, end: int) -> None:
        flags[index_of(name), begin:end] = True

    mentioned: set[str] = set()
    for match in WORD.finditer(text):
        begin, end = match.span()
        word = match.group().lower().replace("’", "'")
        if not is_latin(word):
            mark("other script", begin, end)
        elif is_function_word(word):
            mark("function word", begin, end)
        else:
            stem = word.removesuffix("'s")
            mark("content word", begin, end)
            mark("repeated mention" if stem in mentioned else "first mention", begin, end)
            if is_rare(stem):
                mark("rare word", begin, end)
            mentioned.add(stem)
    for match in NUMBER.finditer(text):
        mark("number", *match.span())
    for place, letter in enumerate(text):
        if not letter.isalnum() and not letter.isspace() and unicodedata.category(letter)[0] in "PS":
            mark("punctuation", place, place + 1)
    for match in QUOTATION.finditer(text):
        mark("quotation", *match.span())
    for begin, end in code_spans(text):
        mark("code", begin, end)
    return flags


def code_spans(text: str) -> Iterator[tuple[int, int]]:
    """The begin and end of every fenced block and of every line that looks like code."""
    for match in FENCE.finditer(text):
        yield match.span()
    begin = 0
    for line in text.splitlines(keepends=True):
        if sum(sign.search(line) is not None for sign in SIGNS_OF_CODE) >= 2:
            yield begin, begin + len(line)
        begin += len(line)


def is_latin(word: str) -> bool:
    """Whether all letters of a word are Latin."""
    return word.isascii() or all(
        unicodedata.name(letter, "").startswith(("LATIN", "MODIFIER", "COMBINING"))
        for letter in word
        if letter.isalpha()
    )


def index_of(name: str) -> int:
    """The place of a kind among KINDS."""
    return PLACES[name]


PLACES = {kind.name: place for place, kind in enumerate(KINDS)}
