"""The result of `varifocal bench training`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from varifocal.results.environment import Environment
from varifocal.results.files import FileRecord


@dataclass(frozen=True, kw_only=True)
class TrainingBench(FileRecord):
    """A result file: a bare step beside a step of the training loop."""

    tag: ClassVar[tuple[str, str]] = ("benchmark", "training")
    what: ClassVar[str] = "a result of 'varifocal bench training'"
    remedy: ClassVar[str] = "make one with its --json option"

    environment: Environment
    preset: str
    mechanism: str
    batch: int
    length: int
    steps: int
    bare_seconds: float
    bare_spread: float
    loop_seconds: float
    loop_spread: float
    loop_over_bare: float
