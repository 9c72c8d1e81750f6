"""clients.json: what other packages did with our models, as `make clients` writes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from varifocal.results.environment import Environment
from varifocal.results.files import FileRecord
from varifocal.results.record import Record, maybe


@dataclass(frozen=True, kw_only=True)
class ClientRow(Record):
    """One thing that a client did."""

    client: str
    """The package's name."""
    version: str
    with_versions: dict[str, str] = field(default_factory=dict)
    """Other packages that took part."""
    ran: str
    """What was run, as a phrase."""
    case: str | None = maybe()
    """Of what, where it was run for several mechanisms."""
    outcome: Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, kw_only=True)
class ClientRuns(FileRecord):
    """A result file."""

    tag: ClassVar[tuple[str, str]] = ("tests", "clients")
    what: ClassVar[str] = "a result of 'make clients'"
    remedy: ClassVar[str] = "make one with `make clients`"

    environment: Environment
    rows: tuple[ClientRow, ...]
