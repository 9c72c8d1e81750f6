"""The result of `varifocal bench attention`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from varifocal.results.environment import Environment
from varifocal.results.files import FileRecord
from varifocal.results.record import Record, named


@dataclass(frozen=True, kw_only=True)
class WorkloadSizes(Record):
    """The sizes of the attention call that was measured, without its length."""

    batch: int = 1
    heads: int
    kv_heads: int
    head_width: int
    dtype: str
    device: str = "cpu"

    @property
    def words(self) -> str:
        """The sizes in words, such as 12 heads of 128 with 6 key heads, float32."""
        return (
            f"{self.heads} heads of {self.head_width} with {self.kv_heads} key heads, "
            f"{self.dtype.removeprefix('torch.')}"
        )


@dataclass(frozen=True, kw_only=True)
class AttentionRow(Record):
    """A contender at one pass and length."""

    name: str
    kind: str = named("pass")
    length: int
    seconds: float
    spread: float
    rounds: int
    speedup: float
    """The speed relative to the baseline in the same run."""
    peak_bytes: int | None
    memory_ratio: float | None


@dataclass(frozen=True, kw_only=True)
class AttentionBench(FileRecord):
    """A result file."""

    tag: ClassVar[tuple[str, str]] = ("benchmark", "attention")
    what: ClassVar[str] = "a result of 'varifocal bench attention'"
    remedy: ClassVar[str] = "make one with its --json option"

    environment: Environment
    workload: WorkloadSizes
    baseline: str
    faults: dict[str, str] = field(default_factory=dict)
    """The contenders that were not timed, by name, and why."""
    unchecked: tuple[str, ...] = ()
    """Contenders that were timed but not compared with the reference."""
    matmul_gflops: float
    rows: tuple[AttentionRow, ...]

    def of(self, kind: str) -> list[AttentionRow]:
        """The rows of a pass, in the order of the file."""
        return [row for row in self.rows if row.kind == kind]

    def names(self, kind: str) -> list[str]:
        """Contenders with a row of that pass, in the order of the file."""
        return list(dict.fromkeys(row.name for row in self.of(kind)))

    def passes(self) -> list[str]:
        return list(dict.fromkeys(row.kind for row in self.rows))

    def lengths(self, kind: str) -> list[int]:
        return sorted({row.length for row in self.of(kind)})

    def row(self, name: str, kind: str, length: int) -> AttentionRow | None:
        """The row of a contender, pass and length, if it was measured."""
        return next((row for row in self.of(kind) if (row.name, row.length) == (name, length)), None)
