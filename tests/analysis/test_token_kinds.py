"""Kinds of token, from text and offsets."""

from __future__ import annotations

import re

import numpy
import pytest

from varifocal.analysis.function_words import is_function_word
from varifocal.analysis.token_kinds import KINDS, token_kinds
from varifocal.analysis.token_texts import place_tokens
from varifocal.data.tokenizers import byte_tokenizer, train_tokenizer, with_end


def kinds_of(text: str, *, rare: tuple[str, ...] = (), document_place: int = 1000) -> list[tuple[str, set[str]]]:
    """Every piece of a text (a word or sign with the space before it) and its kinds."""
    pieces = list(re.finditer(r"\s*(?:\w+(?:['’]\w+)*|[^\w\s])", text))
    begins, ends = (numpy.array([piece.span()[side] for piece in pieces]) for side in (0, 1))
    flags = token_kinds(text, begins, ends, is_rare=lambda word: word in rare, document_place=document_place)
    return [
        (piece.group().strip(), {kind.name for kind, flag in zip(KINDS, flags[:, place], strict=True) if flag})
        for place, piece in enumerate(pieces)
    ]


def test_words_are_function_words_or_content_words() -> None:
    found = dict(kinds_of("the Senate of it's don't"))
    assert found["the"] == found["of"] == found["it's"] == found["don't"] == {"function word"}
    assert found["Senate"] == {"content word", "first mention"}


def test_second_mention_is_a_repeated_one_whatever_its_case_or_possessive() -> None:
    found = kinds_of("Congress met. congress's will")
    assert found[0][1] == {"content word", "first mention"}
    assert found[3] == ("congress's", {"content word", "repeated mention"})


def test_rare_word_is_a_content_word_too() -> None:
    assert dict(kinds_of("ample manumission", rare=("manumission",)))["manumission"] >= {"rare word", "content word"}


def test_numbers_and_signs_are_neither_words_nor_mentions() -> None:
    found = dict(kinds_of("in 1812 , or"))
    assert found["1812"] == {"number"}
    assert found[","] == {"punctuation"}


@pytest.mark.parametrize("text", ['he said "peace now" then', "he said “peace now” then"])
def test_words_between_quotation_marks_are_a_quotation(text: str) -> None:
    found = dict(kinds_of(text))
    assert {word for word, kinds in found.items() if "quotation" in kinds} >= {"peace", "now"}
    assert not {word for word, kinds in found.items() if "quotation" in kinds} & {"said", "then"}


def test_quotation_mark_left_open_quotes_nothing() -> None:
    assert all("quotation" not in kinds for _, kinds in kinds_of('the "open\nline goes on'))


def test_line_of_a_program_is_code_and_a_sentence_is_not() -> None:
    found = kinds_of("We went home (late).\nfor (i = 0; i < n; i++) {\nAnd then we slept.")
    code = {word for word, kinds in found if "code" in kinds}
    assert {"for", "i", "n"} <= code
    assert not code & {"We", "home", "And", "slept"}


def test_letters_of_another_script_are_not_content_words() -> None:
    found = dict(kinds_of("Москва and café"))
    assert found["Москва"] == {"other script"}
    assert "content word" in found["café"]


def test_start_of_document_is_its_first_32_tokens() -> None:
    found = kinds_of(" ".join(["word"] * 40), document_place=0)
    assert [("start of document" in kinds) for _, kinds in found] == [True] * 32 + [False] * 8


def test_part_of_a_document_further_on_has_no_start() -> None:
    assert all("start of document" not in kinds for _, kinds in kinds_of("a b c", document_place=32))


def test_token_without_a_letter_has_no_kind() -> None:
    flags = token_kinds("a  b", numpy.array([1]), numpy.array([3]), is_rare=lambda word: False, document_place=99)
    assert not flags.any()


def test_clitics_belong_to_function_words_and_possessives_do_not() -> None:
    assert is_function_word("they've")
    assert not is_function_word("america's")


def test_tokens_are_placed_where_their_text_stands() -> None:
    texts = ["The naïve café — 1812, “quoted” text."] * 20
    tokenizer = train_tokenizer(texts, size=300)
    tokens = numpy.array(tokenizer.encode(texts[0]))
    placed = place_tokens(tokenizer, tokens)
    assert placed.text == texts[0]
    for token, begin, end in zip(tokens.tolist(), placed.begins, placed.ends, strict=True):
        piece = tokenizer.decode([token])
        assert "�" in piece or placed.text[begin:end] == piece


def test_half_a_letter_at_the_end_is_placed_token_by_token() -> None:
    tokenizer = with_end("bytes", byte_tokenizer(), None)
    tokens = numpy.array([*b"ab", "é".encode()[0]])
    placed = place_tokens(tokenizer, tokens)
    assert len(placed.begins) == 3
    assert placed.text[:2] == "ab"


def test_part_of_placed_tokens_has_its_own_text() -> None:
    tokenizer = with_end("bytes", byte_tokenizer(), None)
    part = place_tokens(tokenizer, numpy.array([*b"hello"])).part(1, 3)
    assert part.text == "el"
    assert part.begins.tolist() == [0, 1]
    assert part.ends.tolist() == [1, 2]
