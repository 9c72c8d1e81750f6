"""A run for a text file of one's own: a small model, sized so that two cores train it in some minutes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from varifocal.training.config import TrainingConfig, config_from

LEAST_BYTES = 20_000
WORDS_FROM = 1_000_000
"""A file of so many bytes has enough text to train a tokenizer on; smaller ones are read byte by byte."""


def text_config(file: Path, overrides: Iterable[str] = ()) -> TrainingConfig:
    """The config with which `varifocal train FILE.txt` trains; `overrides` as for a config file.

    A document is a paragraph, or a line if there are hardly any empty lines, so that some can be held out; rows are
    filled with the text that follows.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {file} as a text in UTF-8: {error}") from error
    size = file.stat().st_size
    if size < LEAST_BYTES:
        raise ValueError(
            f"{file} has {size:,} bytes, and a model learns nothing from fewer than {LEAST_BYTES:,}; give a longer text"
        )
    content = {
        "data": {
            "source": str(file),
            "tokenizer": "train:4096" if size >= WORDS_FROM else "bytes",
            "separator": "\n\n" if text.count("\n\n") >= 40 else "\n",
            "joined": True,
        },
        "model": {"preset": "tiny", "mechanism": "head_gated"},
        "optimization": {
            "steps": 300, "batch": 8, "length": 512, "learning_rate": 2e-3, "betas": [0.9, 0.98], "warmup_steps": 20,
        },
        "validation": {"every": 50, "tokens": 32_768},
        "checkpoints": {"every": 100, "keep": 1},
    }  # fmt: skip
    return config_from(content, overrides, where=str(file))
