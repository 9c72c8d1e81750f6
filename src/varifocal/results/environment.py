"""Where a measurement was made: machine, versions, commit, command."""

from __future__ import annotations

from dataclasses import dataclass

from varifocal.results.record import Record, maybe


@dataclass(frozen=True, kw_only=True)
class Environment(Record):
    """The machine and software that a result was made with. In old or foreign files, parts may be empty."""

    time: str = ""
    command: str = ""
    commit: str | None = None
    """The commit, with a + for uncommitted changes; None outside a checkout."""
    processor: str = ""
    threads: int = 0
    vector_units: str = ""
    python: str = ""
    torch: str = ""
    system: str = ""
    device: str | None = maybe()
    """The device of a benchmark that can run elsewhere than on the CPU."""
