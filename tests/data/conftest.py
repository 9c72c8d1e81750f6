"""Data sets that several tests read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.texts import made_texts, write_jsonl
from varifocal.data import PreparedData
from varifocal.data.prepare import Options, prepare

Copy = Callable[[], Path]


def prepared(source: Path | str, out: Path, **options: object) -> PreparedData:
    """Prepare in this process, with bytes as tokens unless something else is asked for."""
    given = {"tokenizer": "bytes"} | options
    done = prepare(str(source), out, options=Options(**given), workers=1)  # type: ignore[arg-type]
    assert done.data is not None
    return done.data


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return made_texts(600)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> PreparedData:
    """600 documents in bytes, in several shards."""
    folder = tmp_path_factory.mktemp("data")
    for number in range(3):
        write_jsonl(folder / f"{number}.jsonl", [text * 5 for text in texts[number * 200 : number * 200 + 200]])
    return prepared(folder, folder / "out")
