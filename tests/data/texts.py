"""Documents for the tests: made here, or real ones where they are present."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

REAL = Path(os.environ.get("VARIFOCAL_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))

WORDS = [
    "the",
    "river",
    "ran",
    "past",
    "a",
    "mill",
    "where",
    "nine",
    "old",
    "men",
    "kept",
    "bees",
    "中文",
    "文本",
    "很好",
    "прямо",
    "über",
    "naïve",
    "🐝",
    ".\n",
]


def made_texts(count: int, *, seed: int = 0, longest: int = 200) -> list[str]:
    """Different texts of a few words up to `longest`, in several scripts."""
    generator = random.Random(seed)
    return [
        f"{number} " + " ".join(generator.choices(WORDS, k=generator.randint(1, longest))) for number in range(count)
    ]


def write_jsonl(path: Path, texts: Sequence[str | None]) -> Path:
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)), "utf-8")
    return path


def real_file(name: str) -> Path:
    """A file of real text; the test that asks for it is skipped, and says so, where there is none."""
    path = REAL / name
    if not path.is_file():
        pytest.skip(f"{name} is not here; set VARIFOCAL_TEST_DATA to the folder that holds it")
    return path
