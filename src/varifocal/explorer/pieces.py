"""A text as a model sees it: tokens, and which characters each of them covers."""

from __future__ import annotations

from dataclasses import dataclass

from varifocal.explorer.opening import OpenedModel


@dataclass(frozen=True)
class Pieces:
    """The tokens of a text."""

    ids: list[int]
    pieces: list[str]
    """The characters of each token; together they are the text. Empty for a token that goes on with a character that
    the token before it began, and for tokens that the tokenizer adds."""
    starts: list[int]
    """The character of the text at which each token's piece begins."""
    added: dict[int, str]
    """The names of added tokens by their place."""


def cut(opened: OpenedModel, text: str, *, most: int) -> Pieces:
    """The tokens of a text; ValueError if there are none, or more than `most`."""
    if not text:
        raise ValueError("the text is empty; type or paste a few words")
    encoded = opened.tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False)
    ids: list[int] = encoded["input_ids"]
    if not ids:
        raise ValueError(f"the tokenizer of {opened.name} makes no token of this text; type a few words")
    if len(ids) > most:
        raise ValueError(
            f"the text has {len(ids):,} tokens, {opened.name} reads at most {most:,}; shorten it by {len(ids) - most:,}"
        )
    if max(ids) >= opened.model.config.vocab_size:
        raise ValueError(
            f"the tokenizer of {opened.name} gives token {max(ids)}, but the model knows "
            f"{opened.model.config.vocab_size}; it is another model's tokenizer"
        )
    pieces, starts, added = [], [], {}
    reached = 0
    for place, ((begin, end), special) in enumerate(
        zip(encoded["offset_mapping"], encoded["special_tokens_mask"], strict=True)
    ):
        if special and begin == end:
            added[place] = str(opened.tokenizer.convert_ids_to_tokens(ids[place]))
        # A tokenizer may leave the space in front of a word out of its offsets: it belongs to the word here.
        end = max(reached, end)
        pieces.append(text[reached:end])
        starts.append(reached)
        reached = end
    pieces[-1] += text[reached:]
    return Pieces(ids, pieces, starts, added)
