"""conformance.json: the promises that mechanisms keep, as `varifocal check --json` writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from varifocal.results.files import explained, read_json, write_whole
from varifocal.results.record import Record

WHAT = "a result of 'varifocal check'"


@dataclass(frozen=True, kw_only=True)
class FindingRecord(Record):
    """Whether one promise is kept."""

    row: str
    verdict: str
    """kept, broken or not offered."""
    error: float | None
    """None where nothing was measured."""
    detail: str


@dataclass(frozen=True, kw_only=True)
class ConformanceRecord(Record):
    """A mechanism, or a variant of one, with all its findings."""

    name: str
    conforms: bool
    findings: tuple[FindingRecord, ...]


def read_conformance(path: Path) -> list[ConformanceRecord]:
    """The findings in a file; ValueError unless `varifocal check` wrote it."""
    content = read_json(path, what=WHAT)
    if not isinstance(content, list):
        raise ValueError(f"{path} is not {WHAT}; make one with its --json option")
    with explained(path, what=WHAT):
        return [ConformanceRecord.from_json(one, f"[{place}]") for place, one in enumerate(content)]


def write_conformance(path: Path, results: Sequence[ConformanceRecord]) -> None:
    """Write the file whole, or leave it as it was."""
    write_whole(path, json.dumps([one.to_json() for one in results], indent=1) + "\n")
