"""Qwen's tokenizer from its file of ranks: every token's bytes and its rank, from which the merges follow."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING

from varifocal.data.tokenizers import END, byte_letters

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen cuts text into words."""
SPECIAL = (
    END, "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>",
    "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
ADDED = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
"""Tokens of Qwen3 after the special ones, which are not special themselves."""


def tokenizer_from_ranks(path: Path) -> Tokenizer:
    """The tokenizer of a .tiktoken file with Qwen's normalization, pattern and added tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    ranks = read_ranks(path)
    letters = byte_letters()

    def written(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [
        (written(left), written(right))
        for token in sorted(ranks, key=ranks.__getitem__)
        if len(token) > 1
        for left, right in [last_merge(token, ranks)]
    ]
    raw = Tokenizer(models.BPE(vocab={written(token): rank for token, rank in ranks.items()}, merges=merges))
    raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    raw.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    return raw


def read_ranks(path: Path) -> dict[bytes, int]:
    """Every token of the file and its rank."""
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts that merging pairs of lower rank leaves of a token: those whose merge makes it."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        # A pair that is not a token gets the worst rank: it is never merged before a real one.
        pairs = [ranks.get(parts[i] + parts[i + 1], len(ranks)) for i in range(len(parts) - 1)]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]
