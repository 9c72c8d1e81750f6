"""hf_suite.json: what transformers' own tests of a language model said of ours, as `make hf-suite` writes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from varifocal.results.environment import Environment
from varifocal.results.files import FileRecord
from varifocal.results.record import Record


@dataclass(frozen=True, kw_only=True)
class SuiteRow(Record):
    """How many tests of one model had which outcome."""

    model: str
    """Our mechanism, or the model of transformers that stands beside them."""
    passed: int
    failed: int
    skipped: int


@dataclass(frozen=True, kw_only=True)
class SkippedTest(Record):
    """A test that did not run."""

    test: str
    reason: str
    models: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SuiteRuns(FileRecord):
    """A result file."""

    tag: ClassVar[tuple[str, str]] = ("tests", "hf_suite")
    what: ClassVar[str] = "a result of 'make hf-suite'"
    remedy: ClassVar[str] = "make one with `make hf-suite`"

    environment: Environment
    transformers: str
    """The version that is installed."""
    checkout: str
    """The version that the checkout with the tests calls itself."""
    rows: tuple[SuiteRow, ...]
    skipped: tuple[SkippedTest, ...]
