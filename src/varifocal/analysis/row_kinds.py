"""Which tokens of rows are of which kind: by their word, and by how far back it stood before."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor

from varifocal.analysis.token_kinds import index_of, token_kinds

BY_WORD = ("function word", "content word", "number", "punctuation")
SIZES = (64, 256, 1024)
"""Where distances to an earlier mention are divided."""


def row_kinds(rows: Tensor, tokenizer: Any) -> dict[str, Tensor]:
    """By kind, which tokens [N, T] of rows [N, T] are of it.

    Args:
        rows: tokens of texts, one a row.
        tokenizer: their tokenizer of transformers.
    """
    found: dict[str, list[Tensor]] = {}
    for row in rows:
        words = kinds_of_words(row, tokenizer)
        content, distance = words["content word"], distances(row)
        mine = {name: words[name] for name in BY_WORD}
        mine["content, new in the text"] = content & (distance == 0)
        least = 0
        for size in SIZES:
            name = f"content, stood {least + 1} to {size} tokens back"
            mine[name] = content & (distance > least) & (distance <= size)
            least = size
        mine[f"content, stood over {least} tokens back"] = content & (distance > least)
        for name, flags in mine.items():
            found.setdefault(name, []).append(flags)
    return {name: torch.stack(flags) for name, flags in found.items()}


def kinds_of_words(row: Tensor, tokenizer: Any) -> dict[str, Tensor]:
    """By kind, which tokens [T] of a text are of it; each token is decoded alone."""
    texts = [str(tokenizer.decode([token])) for token in row.tolist()]
    ends = numpy.cumsum([len(text) for text in texts], dtype=numpy.int64)
    begins = ends - numpy.array([len(text) for text in texts], dtype=numpy.int64)
    flags = token_kinds("".join(texts), begins, ends, is_rare=lambda word: False, document_place=0)
    return {name: torch.from_numpy(flags[index_of(name)]) for name in BY_WORD}


def distances(row: Tensor) -> Tensor:
    """[T]: how many tokens ago the same token stood; 0 if it is new."""
    last: dict[int, int] = {}
    found = []
    for place, token in enumerate(row.tolist()):
        found.append(place - last[token] if token in last else 0)
        last[token] = place
    return torch.tensor(found)
