"""A text as a model sees it: its tokens, and the characters that each of them covers."""

from __future__ import annotations

from dataclasses import dataclass

from varifocal.explorer.opening import OpenedModel


@dataclass(frozen=True)
class Pieces:
    """The tokens of a text."""

    ids: list[int]
    pieces: list[str]
    """The characters of each token; joined, they are the text. A token that continues a character of the token before
    it has none, and neither has a token that the tokenizer adds."""
    starts: list[int]
    """The place in the text where each token's piece begins."""
    added: dict[int, str]
    """The names of added tokens by their place."""


def cut(opened: OpenedModel, text: str, *, most: int) -> Pieces:
    """The tokens of a text; ValueError if there are none, or more than `most`."""
    if not text:
        raise ValueError("the text is empty; type or paste a few words")
    encoded = opened.tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False)
    ids: list[int] = encoded["input_ids"]
    if not ids:
        raise ValueError(f"the tokenizer of {opened.name} finds no token in this text; type a few words")
    if len(ids) > most:
        raise ValueError(
            f"the text has {len(ids):,} tokens, but {opened.name} reads at most {most:,}; shorten it by "
            f"{len(ids) - most:,}"
        )
    if max(ids) >= opened.model.config.vocab_size:
        raise ValueError(
            f"the tokenizer of {opened.name} gives token {max(ids)}, but the model's vocabulary has "
            f"{opened.model.config.vocab_size}; use the tokenizer that the model was trained with"
        )
    pieces, starts, added = [], [], {}
    reached = 0
    for place, ((begin, end), special) in enumerate(
        zip(encoded["offset_mapping"], encoded["special_tokens_mask"], strict=True)
    ):
        if special and begin == end:
            added[place] = str(opened.tokenizer.convert_ids_to_tokens(ids[place]))
        # A tokenizer may leave the space before a word out of its offsets; here it belongs to the word.
        end = max(reached, end)
        pieces.append(text[reached:end])
        starts.append(reached)
        reached = end
    pieces[-1] += text[reached:]
    return Pieces(ids, pieces, starts, added)
