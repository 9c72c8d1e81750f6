"""Rows of tokens to fit gates on and to ask: long texts as they are, and long texts with facts planted in them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

COLOURS = ("red", "blue", "green", "yellow", "silver", "black", "white", "brown", "purple", "orange")
THINGS = ("door", "lamp", "river", "garden", "letter", "bridge", "clock", "ship", "mirror", "tower", "horse", "map")
PLACES = (
    *("Lisbon", "Cairo", "Oslo", "Quito", "Dublin", "Lima", "Prague", "Seoul", "Tunis", "Vienna", "Athens", "Havana"),
    *("Kyoto", "Milan", "Nairobi", "Ottawa", "Perth", "Riga", "Sofia", "Turin", "Warsaw", "Zagreb", "Bergen", "Delhi"),
)


CHARACTERS = 20
"""Of a document, so many for each token of a row are read: some four rows of text, and tokenizing takes no minutes."""


class Wording(NamedTuple):
    """How a fact is told and asked for; the answer follows the question."""

    told: str
    asked: str


FITTED = Wording("\nThe pass key of the {name} is {code}. Remember it.\n", "\nThe pass key of the {name} is")
MEASURED = Wording(
    "\nOne of the special magic numbers for {name} is: {code}.\n",
    "\nWhat is the special magic number for {name} mentioned in the text? "
    "The special magic number for {name} mentioned in the text is:",
)
"""What is measured must not be what was fitted: another sentence, other names and longer numbers."""


@dataclass(frozen=True, eq=False)
class FitRow:
    """A text and how much each of its positions counts."""

    tokens: Tensor
    """[T]."""
    weight: Tensor
    """[T], sums to 1."""


@dataclass(frozen=True, eq=False)
class FactRow:
    """A text with facts in it that it asks for at its end."""

    tokens: Tensor
    """[T], answers included."""
    answers: tuple[slice, ...]
    """Where the tokens of each answer stand."""
    depths: tuple[float, ...]
    """Where each fact was told, as a share of the text before it is asked for."""
    asked: int
    """Where the first question begins."""


class Library:
    """Documents as tokens; those that are too short for a row are left out."""

    def __init__(self, texts: Iterable[str], tokenizer: Any, *, least: int, most: int = 400) -> None:
        self.tokenizer = tokenizer
        self.documents: list[list[int]] = []
        longest = 0
        for text in texts:
            # Fewer characters than tokens wanted cannot be enough, and tokenizing is what takes time.
            if len(text) < least:
                continue
            tokens = self.encode(text[: least * CHARACTERS])
            longest = max(longest, len(tokens))
            if len(tokens) >= least:
                self.documents.append(tokens)
            if len(self.documents) == most:
                break
        if not self.documents:
            raise ValueError(
                f"no document has the {least} tokens of a row, the longest has {longest}; give longer texts, "
                "or a shorter --length"
            )

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special ones."""
        found: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return found

    def passage(self, length: int, draw: random.Random) -> list[int]:
        """A random stretch of a random document."""
        fitting = [one for one in self.documents if len(one) >= length]
        if not fitting:
            longest = max(len(one) for one in self.documents)
            raise ValueError(f"a passage of {length} tokens is wanted, the longest document has {longest}")
        document = draw.choice(fitting)
        first = draw.randrange(len(document) - length + 1)
        return document[first : first + length]

    def passages(self, length: int, count: int) -> Tensor:
        """[count, length]: the beginnings of as many documents, in their order; then further stretches of them."""
        found: list[list[int]] = []
        for number in range(max(len(one) for one in self.documents) // length):
            for document in self.documents:
                part = document[number * length : (number + 1) * length]
                if len(part) == length:
                    found.append(part)
                if len(found) == count:
                    return torch.tensor(found)
        raise ValueError(f"the documents hold {len(found)} stretches of {length} tokens, {count} were asked for")

    def with_facts(
        self,
        length: int,
        draw: random.Random,
        *,
        names: Sequence[str],
        wording: Wording = FITTED,
        depths: Sequence[float] | None = None,
        only: str | None = None,
        digits: int = 5,
    ) -> FactRow:
        """A passage of `length` tokens with a fact for each name, which are asked for at its end.

        Args:
            length: tokens in all.
            draw: source of chance.
            names: what the facts are about.
            wording: how they are told and asked for.
            depths: where they are told, from 0 for the start of the text to 1 for its end; None for anywhere.
            only: the one name that is asked for; None for all, in random order.
            digits: of a code.
        """
        codes = {name: "".join(draw.choice("0123456789") for _ in range(digits)) for name in names}
        depths = [draw.random() for _ in names] if depths is None else depths
        questions: list[tuple[str, list[int], list[int]]] = []
        for name in draw.sample(list(names), len(names)) if only is None else [only]:
            question = self.encode(wording.asked.format(name=name))
            whole = self.encode(wording.asked.format(name=name) + f" {codes[name]}")
            questions.append((name, question, whole[len(question) :]))
        told = {name: self.encode(wording.told.format(name=name, code=codes[name])) for name in names}
        filler = length - sum(map(len, told.values())) - sum(len(q) + len(a) for _, q, a in questions)
        if filler < len(names):
            raise ValueError(f"a text of {length} tokens has no room for {len(names)} facts; give a longer --length")
        text = self.passage(filler, draw)
        tokens, begun = list[int](), 0
        for depth, name in sorted(zip(depths, names, strict=True)):
            end = min(filler, int(depth * filler))
            tokens += text[begun:end] + told[name]
            begun = end
        tokens += text[begun:]
        answers: list[slice] = []
        asked = len(tokens)
        for _, question, answer in questions:
            tokens += question
            answers.append(slice(len(tokens), len(tokens) + len(answer)))
            tokens += answer
        by_name = dict(zip(names, depths, strict=True))
        found = tuple(by_name[name] for name, _, _ in questions)
        return FactRow(torch.tensor(tokens), tuple(answers), found, asked)


def fit_rows(library: Library, lengths: Sequence[int], *, seed: int, facts: int) -> Iterator[FitRow]:
    """Rows without end: a passage as it is, then one with planted facts, and so on; lengths vary."""
    draw = random.Random(seed)
    names = [f"{colour} {thing}" for colour in COLOURS for thing in THINGS]
    number = 0
    while True:
        length = draw.choice(list(lengths))
        if facts and number % 2:
            row = library.with_facts(length, draw, names=draw.sample(names, facts))
            yield FitRow(row.tokens, weight_of_answers(row))
        else:
            tokens = torch.tensor(library.passage(length, draw))
            yield FitRow(tokens, torch.full((length,), 1 / length))
        number += 1


def question_rows(library: Library, lengths: Sequence[int], *, seed: int, facts: int) -> Iterator[FitRow]:
    """Rows without end that all have facts, and of which only questions and answers count."""
    draw = random.Random(seed)
    names = [f"{colour} {thing}" for colour in COLOURS for thing in THINGS]
    while True:
        row = library.with_facts(draw.choice(list(lengths)), draw, names=draw.sample(names, facts))
        weight = torch.zeros(len(row.tokens))
        weight[row.asked :] = 1 / (len(row.tokens) - row.asked)
        yield FitRow(row.tokens, weight)


def weight_of_answers(row: FactRow) -> Tensor:
    """Half for the states that answers are read from, and half for all."""
    length = len(row.tokens)
    weight = torch.full((length,), 0.5 / length)
    places = [place - 1 for answer in row.answers for place in range(answer.start, answer.stop)]
    weight[places] += 0.5 / len(places)
    return weight
